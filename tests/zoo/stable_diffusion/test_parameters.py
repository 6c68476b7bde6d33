"""The text of a picture's parameters, written and read back."""

from __future__ import annotations

import re

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from zoo.errors import UserError
from zoo.stable_diffusion.parameters import Parameters, describe, flags_of, parse, write

FLAGS = {
    "steps": 20,
    "sampler": "Euler a",
    "cfg_scale": 7.0,
    "seed": 42,
    "width": 512,
    "height": 768,
}
SETTINGS = {
    "Steps": "20",
    "Sampler": "Euler a",
    "CFG scale": "7",
    "Seed": "42",
    "Size": "512x768",
}


def test_the_text_is_a1111s() -> None:
    parameters = Parameters("a cat,\nsitting", "ugly, dog", describe({**FLAGS, "height": 512}))
    assert write(parameters) == (
        "a cat,\nsitting\nNegative prompt: ugly, dog\n"
        "Steps: 20, Sampler: Euler a, CFG scale: 7, Seed: 42, Size: 512x512"
    )


def test_a1111s_own_text_is_read() -> None:
    text = (
        "a cat\nNegative prompt: ugly,\ndog\nSteps: 20, Sampler: DPM++ 2M, Schedule type: Karras, "
        "CFG scale: 7.5, Seed: 965400086, Size: 512x768, Model hash: 6ce0161689, Model: v1-5, "
        'VAE hash: 735e4c3a44, Lora hashes: "a: 1, b: 2", TI: "x: \\"y\\"", Version: v1.10.1'
    )
    found = parse(text)
    assert (found.prompt, found.negative_prompt) == ("a cat", "ugly,\ndog")
    assert found.settings["Sampler"] == "DPM++ 2M" and found.settings["Version"] == "v1.10.1"
    assert found.settings["Lora hashes"] == "a: 1, b: 2" and found.settings["TI"] == 'x: "y"'
    assert flags_of(found, "x.png") == {
        "steps": 20,
        "sampler": "DPM++ 2M",
        "sigmas": "Karras",
        "cfg_scale": 7.5,
        "seed": 965400086,
        "width": 512,
        "height": 768,
        "model": "v1-5",
    }


def test_flags_become_settings_and_come_back() -> None:
    flags = {**FLAGS, "strength": 0.75, "clip_skip": 2, "model": "a, b: c", "eta": 1e-7}
    settings = describe({**flags, "sigmas": None, "unknown": 5})
    assert settings["Denoising strength"] == "0.75" and "unknown" not in settings
    parsed = parse(write(Parameters("x", "", settings)))
    assert flags_of(parsed, "x.png") == flags


def test_a_text_without_settings_is_a_prompt() -> None:
    for text in ("a cat", "a cat\nSteps: to heaven", "title: a cat, style: oil", ""):
        assert parse(text) == Parameters(text)


tricky = st.one_of(
    st.text(),
    st.text(st.sampled_from('ab ,:"\\\n\r\t')),
    st.lists(
        st.sampled_from(
            ["a", "\n", "Negative prompt:", "Steps: 20", ", ", '"', "Exact prompt: ", "\\", ":"]
        )
    ).map("".join),
)
labels = st.from_regex(r"[A-Za-z][A-Za-z0-9 /-]{0,20}[a-z]", fullmatch=True)


@settings(deadline=None)
@given(tricky, tricky, st.dictionaries(labels, tricky, max_size=5))
@example("Negative prompt: x", "y", {})
@example("a\nSteps: 20, Seed: 1", "", {})
@example("", "a", {"Steps": "20"})
@example(" a ", "\nb", SETTINGS)
def test_every_text_comes_back_as_it_was(prompt, negative, settings) -> None:
    parameters = Parameters(prompt, negative, settings)
    assert parse(write(parameters)) == parameters


@settings(deadline=None)
@given(st.text(st.sampled_from('aS ,:"\\\n')))
def test_any_text_can_be_read(text) -> None:
    parse(text)


@pytest.mark.parametrize("piece", ['a: "\\",', 'a: ",', "word ", "a:", "a: b,"])
def test_hostile_text_takes_no_quadratic_time(piece) -> None:
    parse("Steps: 20, " + piece * (1_000_000 // len(piece)))


@pytest.mark.parametrize(
    ("label", "value"),
    [
        ("Steps", "many"),
        ("Seed", "9" * 5000),
        ("CFG scale", "high"),
        ("Size", "512"),
        ("Size", "1x2x3"),
        ("Size", "ax5"),
    ],
)
def test_a_setting_that_is_no_number_is_one_line(label, value) -> None:
    with pytest.raises(UserError, match=f"^x.png: .*{label}") as error:
        flags_of(Parameters("", "", {**SETTINGS, label: value}), "x.png")
    assert not re.search(r"\n", str(error.value))
