"""Native code: the C++ files of this library, compiled once per machine and loaded."""
