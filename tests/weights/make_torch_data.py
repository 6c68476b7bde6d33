"""Makes the files of tests/weights/data with torch: `python -m tests.weights.make_torch_data`.

They are committed, so that the default tests, which have no torch, read what torch really writes.
"""

from __future__ import annotations

import argparse
from collections import OrderedDict
from pathlib import Path

DATA = Path(__file__).parent / "data"


def state() -> OrderedDict:
    """Tensors of every element type, and views: what they hold is in `test_pytorch.EXPECTED`."""
    import torch

    base = torch.arange(24.0).reshape(4, 6)
    tensors = OrderedDict(
        base=base,
        transposed=base.t(),
        part=base[1:3, ::2],
        expanded=torch.tensor([7.0]).expand(3, 2),
        scalar=torch.tensor(3.5),
        empty=torch.zeros(0, 4),
        parameter=torch.nn.Parameter(torch.tensor([1.0, -1.0])),
    )
    kinds = "float64 float16 bfloat16 int8 int16 int32 int64 uint8 bool complex64 complex128"
    kinds += " uint16 uint32 uint64 float8_e4m3fn float8_e5m2"
    for kind in kinds.split():
        tensors[f"type.{kind}"] = torch.tensor([0.0, 1.0, 2.0]).to(getattr(torch, kind))
    return tensors


def training_run() -> dict:
    """What a training run leaves around a model: NumPy numbers, options, the optimiser's state."""
    import numpy as np
    import torch

    return {
        "epoch": 3,
        "state_dict": state(),
        "optimizer_states": [{"state": {0: {"exp_avg": torch.zeros(3)}}}],
        "loss": np.float64(0.25),
        "seeds": np.arange(4, dtype=np.int32).reshape(2, 2),
        "options": argparse.Namespace(lr=0.5, betas=(0.9, 0.999)),
        "kind": torch.float16,
        "shape": torch.Size([2, 3]),
        "device": torch.device("cpu"),
        "milestones": {1, 2},
        "hash": b"\x00\xff",
    }


def main() -> None:
    import torch

    for old in (False, True):
        suffix = "legacy" if old else "zip"
        options = {"_use_new_zipfile_serialization": not old}
        torch.save(state(), DATA / f"state_{suffix}.pt", **options)
        torch.save(training_run(), DATA / f"training_{suffix}.ckpt", **options)


if __name__ == "__main__":
    main()
