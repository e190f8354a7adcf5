"""`polaformer data text`: prepare the movie reviews of the Long Range Arena."""

from dataclasses import dataclass

from polaformer.cli.data import Conversion


@dataclass(frozen=True)
class DataText(Conversion):
    """Prepare Text of the Long Range Arena (movie reviews) from IMDb.

    SOURCE is an aclImdb folder (train/neg/*.txt and so on), a folder of Parquet files such as the Hugging Face dataset imdb, or
    JSON lines (.jsonl, .jsonl.gz, .jsonl.xz) with "text", "label" and "split".

    Example: polaformer data text aclImdb --out lra/text
    """

    dataset = "text"
