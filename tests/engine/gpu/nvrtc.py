"""What NVIDIA's compiler says of a source. It needs no driver and no GPU."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

import pytest


@dataclass
class Kernel:
    """registers of a work-item, bytes of shared memory of a block, bytes spilled to memory."""

    registers: int = 0
    shared: int = 0
    spilled: int = 0


@dataclass
class Report:
    """complaints: errors and warnings; kernels: by name."""

    complaints: list[str]
    kernels: dict[str, Kernel] = field(default_factory=dict)


def compiled(source: str, processor: str) -> Report:
    """Compile for a processor such as "sm_90"; a skip without the `cuda` extra."""
    nvrtc = pytest.importorskip("cuda.bindings.nvrtc", reason="needs the cuda extra")
    _, program = nvrtc.nvrtcCreateProgram(source.encode(), b"zoo.cu", 0, [], [])
    options = [f"--gpu-architecture={processor}", "-default-device", "--ptxas-options=-v"]
    (code,) = nvrtc.nvrtcCompileProgram(program, len(options), [o.encode() for o in options])
    _, size = nvrtc.nvrtcGetProgramLogSize(program)
    log = bytearray(size)
    nvrtc.nvrtcGetProgramLog(program, log)
    nvrtc.nvrtcDestroyProgram(program)
    lines = log.rstrip(b"\0").decode(errors="replace").splitlines()
    report = Report([x for x in lines if re.search(r"\b(error|warning)\b", x, re.IGNORECASE)])
    if code != nvrtc.nvrtcResult.NVRTC_SUCCESS and not report.complaints:
        report.complaints.append(str(code))
    kernel = Kernel()
    for line in lines:
        if found := re.search(r"Compiling entry function '(\w+)'", line):
            kernel = report.kernels[found[1]] = Kernel()
        for name, text in (
            ("registers", r"Used (\d+) registers"),
            ("shared", r"(\d+) bytes smem"),
            ("spilled", r"(\d+) bytes spill stores"),
        ):
            if found := re.search(text, line):
                setattr(kernel, name, int(found[1]))
    return report
