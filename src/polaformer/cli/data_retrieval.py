"""`polaformer data retrieval`: prepare the pairs of papers of the Long Range Arena."""

from dataclasses import dataclass

from polaformer.cli.data import Conversion


@dataclass(frozen=True)
class DataRetrieval(Conversion):
    """Prepare Retrieval of the Long Range Arena (pairs of papers) from the AAN files.

    SOURCE is a folder with new_aan_pairs.train.tsv, new_aan_pairs.eval.tsv and new_aan_pairs.test.tsv of the release, or with
    pairs of ids (NAME_pairs.train.tsv and so on) and docs.jsonl (.gz, .xz) with "id" and "text".

    Example: polaformer data retrieval lra_release/lra_release/tsv_data --out lra/retrieval
    """

    dataset = "retrieval"
