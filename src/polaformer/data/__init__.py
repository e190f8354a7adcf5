"""Bytes to samples: image folders, archives, array files and bundled digits; decoding, order and augmentation."""
