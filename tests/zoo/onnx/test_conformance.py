"""The onnx package's conformance suite through its own runner; needs the `peers` extra.

At least 95 % of the node tests must pass; what doesn't is listed here with the reason.
"""

from __future__ import annotations

import re
import unittest
import warnings

import pytest

pytestmark = pytest.mark.peers

# A pattern of test names, and why they fail or aren't run.
EXCLUDED = {
    r"test_(bernoulli|training_dropout).*": "the numbers of another random generator are expected",
    r"test_image_decoder_.*": "files are decoded by their own libraries before a model sees them",
    r"test_tfidfvectorizer_.*": "a text feature of classical models; no network has it",
    r"test_(adam|adagrad|momentum|nesterov)_?.*": "a step of training in a preview domain",
    r"test_ai_onnx_ml_tree_ensemble_.*": "trees are no networks",
    r"test_(basic_deform_conv|deform_conv)_.*": "DeformConv is rare and not written yet",
    r"test_linear_attention_(?!.*expanded).*": "LinearAttention is new and not written yet",
    r"test_causal_conv_with_state_(?!.*expanded).*": "CausalConvWithState is not written yet",
    r"test_flexattention(?!.*expanded).*": "an operator of the preview domain",
    r"test_cast_e8m0_FLOAT(16)?_to_FLOAT8E8M0": "rounds to the nearest power of two, not up",
    r"test_dynamicquantizelinear(_expanded)?": "a tie after a quotient by reciprocal: 1 off",
    r"test_attention_4d_causal_fp16_expanded": "half precision: 0.12 % off where 0.1 % is allowed",
    r"test_loop16_seq_none": "the suite can't compare the sequence that it expects",
    r"test_gradient_of_.*": "a step of training in a preview domain",
    r"test_(bvlc|densenet|inception|resnet50|shufflenet|squeezenet|vgg19|zfnet512).*": "a download",
}
LEAST = 0.95  # of the node tests


def _items() -> dict[str, dict[str, object]]:
    """The suite's test functions on the CPU: by group, by name."""
    runner_module = pytest.importorskip("onnx.backend.test.runner")
    from tests.zoo.onnx.backend import Reference

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the suite's own sums overflow
        runner = runner_module.Runner(Reference, __name__)
    return {
        group: {
            name.removesuffix("_cpu"): item.func
            for name, item in items.items()
            if name.endswith("_cpu")
        }
        for group, items in runner._filtered_test_items.items()
    }


def _failures(tests: dict[str, object]) -> dict[str, str]:
    """What went wrong, by test."""
    out = {}
    for name, function in tests.items():
        try:
            function(unittest.TestCase())
        except unittest.SkipTest:
            continue
        except Exception as error:  # noqa: BLE001 - whatever it is, the test failed
            out[name] = f"{type(error).__name__}: {error}"[:300]
    return out


def _excluded(name: str) -> bool:
    return any(re.fullmatch(pattern, name) for pattern in EXCLUDED)


def _check(tests: dict[str, object]) -> None:
    run = {name: function for name, function in tests.items() if not _excluded(name)}
    failures = _failures(run)
    assert not failures, "\n".join(f"{name}: {why}" for name, why in failures.items())


@pytest.fixture(scope="module")
def suite() -> dict[str, dict[str, object]]:
    return _items()


def test_node_models_pass_but_for_those_listed(suite) -> None:
    tests = suite["NodeModel"]
    assert len(tests) > 1000
    _check(tests)


def test_few_node_models_are_listed(suite) -> None:
    tests = suite["NodeModel"]
    assert sum(not _excluded(name) for name in tests) >= LEAST * len(tests)


@pytest.mark.parametrize("group", ["SimpleModel", "PyTorchConvertedModel", "PyTorchOperatorModel"])
def test_other_models_pass_but_for_those_listed(suite, group: str) -> None:
    _check(suite[group])
