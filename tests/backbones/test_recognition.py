"""Which model a file is for."""

import subprocess
import sys

import pytest
import torch
from safetensors.torch import save_file

import polaformer
from models import small
from polaformer import CheckpointError
from polaformer.backbones.recognition import model_of_file, recognise
from polaformer.weights.files import read_state_dict


@pytest.mark.parametrize("name", ["pola_pvt_tiny", "softmax_pvt_v2_b0", "pola_deit_tiny", "pola_swin_tiny_384"])
def test_a_model_is_recognised_by_names_and_shapes(name):
    with torch.device("meta"):
        state = polaformer.create_model(name, num_classes=11).state_dict()
    assert recognise(state) == {"name": name, "num_classes": 11}


def test_what_is_no_model_of_ours_is_not_recognised():
    assert recognise({"head.weight": torch.ones(3, 4)}) is None
    assert recognise(small("pola_pvt_tiny").state_dict()) is None


def test_nothing_is_unpickled_but_in_one_place_and_there_with_care():
    """Row X1 of our goals: torch.load is called in one file, with weights_only=True."""
    code = (
        "import ast, pathlib, polaformer\n"
        "root = pathlib.Path(polaformer.__file__).parent\n"
        "for path in root.rglob('*.py'):\n"
        "    for node in ast.walk(ast.parse(path.read_text())):\n"
        "        if isinstance(node, ast.Call):\n"
        "            name = ast.unparse(node.func)\n"
        "            if name in ('torch.load', 'pickle.load', 'pickle.loads', 'eval', 'exec', 'joblib.load'):\n"
        "                print(path.name, name, [k.arg + '=' + ast.unparse(k.value) for k in node.keywords])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["files.py torch.load [\"map_location='cpu'\", 'weights_only=True']"]


@pytest.mark.parametrize(
    "text",
    [
        "no json",
        "[1]",
        "{}",
        '{"name": "resnet50"}',
        '{"name": "pola_pvt_tiny", "depths": [300, 1, 1, 1]}',  # more would take minutes to build, were it not refused
        '{"name": "pola_pvt_tiny", "num_classes": 1000000000000}',
        '{"name": "pola_pvt_tiny", "dims": "wide"}',
        '{"name": "pola_pvt_tiny", "unknown": 1}',
        '{"name": "pola_pvt_tiny", "checkpoint": "/etc/passwd"}',
        '{"name": "pola_pvt_tiny", "features_only": true}',
        "[" * 10000,
    ],
)
def test_nonsense_about_the_model_of_a_file_is_one_error(text, tmp_path):
    path = tmp_path / "f.safetensors"
    save_file({"x": torch.ones(1)}, path, metadata={"format": "polaformer", "version": "1", "model": text})
    with pytest.raises(CheckpointError, match="its description of the model is invalid"):
        model_of_file(path, read_state_dict(path))


def test_a_file_whose_parameters_are_not_those_of_its_model_is_one_error(tmp_path):
    path = tmp_path / "f.safetensors"
    about = {"format": "polaformer", "version": "1", "model": '{"name": "pola_pvt_tiny"}'}
    save_file({f"x{i}": torch.ones(1000) for i in range(40)}, path, metadata=about)
    with pytest.raises(CheckpointError, match="not those of the model that it names"):
        model_of_file(path, read_state_dict(path))
