"""Bytes to samples: image folders, archives, array files, the bundled digits; decoding, order and augmentation."""
