"""Models that wheels ship, and a driving model's shape, beside onnxruntime."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import numpy as np
import pytest

from tests.zoo.onnx import driving
from zoo.onnx.model import load

pytestmark = pytest.mark.peers

CLOSE = 1e-4  # of the largest number: sums of thousands of products in another order


def shipped(package: str, pattern: str) -> Path:
    """A file of an installed package, which is not imported.

    Without the package, as rapidocr has none for Python 3.13 and later: skip.
    """
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        pytest.skip(f"needs the package {package}")
    return next(Path(spec.origin).parent.glob(pattern))


def picture(height: int, width: int) -> np.ndarray:
    """Dark lines of blocks on a light ground, as text is, in -1 … 1: (1, 3, H, W)."""
    rng = np.random.default_rng(0)
    blocks = np.kron(rng.random((height // 8, width // 8)) > 0.5, np.ones((8, 8)))
    lines = (np.arange(height) // 16 % 2)[:, None]
    gray = (0.9 - 1.6 * blocks * lines + 0.05 * rng.standard_normal((height, width))).clip(-1, 1)
    return np.broadcast_to(gray.astype(np.float32), (1, 3, height, width)).copy()


def compare(path: Path, *calls: dict[str, np.ndarray]) -> None:
    """Every output of every call equals onnxruntime's."""
    onnxruntime = pytest.importorskip("onnxruntime")
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    model = load(path)
    for inputs in calls:
        ours = model.run(inputs)
        for output, theirs in zip(session.get_outputs(), session.run(None, inputs)):
            got = ours[output.name]
            assert got.shape == theirs.shape and got.dtype == theirs.dtype
            worst = np.abs(got - theirs).max() / np.abs(theirs).max()
            assert worst < CLOSE, f"{output.name} is off by {worst:.1e}"


@pytest.mark.parametrize("size", [(160, 320), (96, 128)])
def test_text_detector(size: tuple[int, int]) -> None:
    path = shipped("rapidocr_onnxruntime", "models/*det_infer.onnx")
    compare(path, {"x": picture(*size)})


def test_text_direction() -> None:
    path = shipped("rapidocr_onnxruntime", "models/*cls_infer.onnx")
    compare(path, {"x": picture(48, 192)}, {"x": picture(48, 192)[..., ::-1].copy()})


def test_text_reader() -> None:
    path = shipped("rapidocr_onnxruntime", "models/*rec_infer.onnx")
    compare(path, {"x": picture(48, 320)})


def test_file_types() -> None:
    path = shipped("magika", "models/*/model.onnx")
    source = Path(__file__).read_bytes()[:1024].ljust(1024, b" ")
    content = np.frombuffer(source + source, np.uint8).astype(np.int32)[None]
    compare(path, {"bytes": content}, {"bytes": content[:, ::-1].copy()})


def test_voice_activity() -> None:
    path = shipped("faster_whisper", "assets/silero_vad*.onnx")
    time = np.arange(8 * 576, dtype=np.float32).reshape(8, 576) / 16000
    sound = 0.3 * np.sin(2 * np.pi * 180 * time) * (1 + np.sin(2 * np.pi * 4 * time))
    state = np.zeros((1, 1, 128), np.float32)
    compare(path, {"input": sound.astype(np.float32), "h": state, "c": state})


def test_driving_model_at_full_size(tmp_path: Path) -> None:
    path = tmp_path / "driving.onnx"
    path.write_bytes(driving.driving())
    compare(path, driving.inputs_of(), driving.inputs_of(seed=2))
