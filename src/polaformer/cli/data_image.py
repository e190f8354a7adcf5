"""`polaformer data image`: prepare the grey images of the Long Range Arena."""

from dataclasses import dataclass

from polaformer.cli.data import Conversion


@dataclass(frozen=True)
class DataImage(Conversion):
    """Prepare Image of the Long Range Arena (grey pixels in a row) from CIFAR-10.

    SOURCE is CIFAR-10 in its binary form (a folder with data_batch_1.bin to data_batch_5.bin and test_batch.bin), or an .npz
    with x_train, y_train, x_test and y_test. One training image in ten is held out for validation, the same ones every time.

    Example: polaformer data image cifar-10-batches-bin --out lra/image
    """

    dataset = "image"
