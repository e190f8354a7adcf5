"""The memory allocator of the C library, as attention on a CPU needs it."""

import ctypes
import functools
import sys

NUM_BYTES = 31 << 20


@functools.cache
def keep_freed_memory() -> None:
    """Makes the C library on Linux keep the memory of freed temporaries; only the first call does anything.

    Until a large block has been freed once, the C library returns the memory of temporaries to the system after every call and
    faults it in again in the next one, which takes two to three times as long at a thousand tokens. The block that is allocated
    and freed here is never touched, so it occupies no physical memory.
    """
    if sys.platform != "linux":
        return
    library = ctypes.CDLL(None)
    library.malloc.restype, library.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
    library.free.argtypes = [ctypes.c_void_p]
    library.free(library.malloc(NUM_BYTES))
