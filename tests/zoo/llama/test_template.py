"""Chat templates: prompt ids, and text that must not become a special token."""

from __future__ import annotations

import pytest

from tests.zoo.llama import vocab
from zoo.llama.gguf_tokenizer import from_gguf
from zoo.llama.template import ChatTemplate, Guard, TemplateError
from zoo.llama.tokenizer import Tokenizer

# The conventions of some families, written afresh: what matters is where they strip, what they
# put beside a message and which tokens they spell.
CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '\\n' + message.content"
    " + '<|im_end|>' + '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
LLAMA2 = """
{%- if messages[0]['role'] == 'system' -%}
  {%- set system = '<<SYS>>\\n' + messages[0]['content'] + '\\n<</SYS>>\\n\\n' -%}
  {%- set turns = messages[1:] -%}
{%- else -%}
  {%- set system = '' -%}{%- set turns = messages -%}
{%- endif -%}
{%- for message in turns -%}
  {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) -%}
    {{- raise_exception('roles must alternate') -}}
  {%- endif -%}
  {%- set content = (system if loop.first else '') + message['content'] -%}
  {%- if message['role'] == 'user' -%}
    {{- bos_token + '[INST] ' + content.strip() + ' [/INST]' -}}
  {%- else -%}
    {{- ' ' + content.strip() + ' ' + eos_token -}}
  {%- endif -%}
{%- endfor -%}
"""
LLAMA3 = (
    "{{ bos_token }}{% for message in messages %}"
    "{{ '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' }}"
    "{{ message['content'] | trim + '<|eot_id|>' }}{% endfor %}"
    "{% if add_generation_prompt %}"
    "{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
MISTRAL = (
    "{{ bos_token }}{% for message in messages %}{% if message['role'] == 'user' %}"
    "{{ '[INST]' + message['content'] + '[/INST]' }}{% else %}"
    "{{ message['content'] | trim + eos_token }}{% endif %}{% endfor %}"
)
GEMMA = (
    "{{ bos_token }}{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system role') }}"
    "{% endif %}{% for message in messages %}"
    "{% set role = 'model' if message['role'] == 'assistant' else message['role'] %}"
    "{{ '<start_of_turn>' + role + '\n' + message['content'] | trim + '<end_of_turn>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"
)
MISTRAL_3 = """
{%- if messages[0]['role'] == 'system' %}
  {%- set system, turns = messages[0]['content'], messages[1:] %}
{%- else %}{%- set turns = messages %}{%- endif %}
{%- set users = turns | selectattr('role', 'equalto', 'user') | list %}
{%- set ns = namespace(index=0) %}
{{- bos_token }}
{%- for message in turns %}
  {%- if not (message.tool_calls is defined and message.tool_calls is not none) %}
    {%- if (message['role'] == 'user') != (ns.index % 2 == 0) %}
      {{- raise_exception('roles must alternate') }}
    {%- endif %}{%- set ns.index = ns.index + 1 %}
  {%- endif %}
  {%- if message['role'] == 'user' %}
    {%- if loop.last and system is defined %}{{- '[INST] ' + system + '\n\n' + message['content'] }}
    {%- else %}{{- '[INST] ' + message['content'] }}{%- endif %}{{- '[/INST]' }}
  {%- else %}{{- ' ' + message['content'] | trim + eos_token }}{%- endif %}
{%- endfor %}
"""
FAMILIES = {
    "chatml": (CHATML, ("<|im_start|>", "<|im_end|>")),
    "llama2": (LLAMA2, ("<unk>", "<s>", "</s>")),
    "llama3": (
        LLAMA3,
        ("<|start_header_id|>", "<|end_header_id|>", "<|begin_of_text|>", "<|eot_id|>"),
    ),
    "mistral": (MISTRAL, ("[INST]", "[/INST]", "<s>", "</s>")),
    "mistral 3": (MISTRAL_3, ("[INST]", "[/INST]", "<s>", "</s>")),
    "gemma": (GEMMA, ("<bos>", "<start_of_turn>", "<end_of_turn>")),
}
TURNS = ("  What is 2 < 3? ", "It is true.\n", "\tAnd a[0] > b | c? ")


def messages(*contents: str) -> list[dict[str, str]]:
    roles = ("user", "assistant")
    return [{"role": roles[i % 2], "content": text} for i, text in enumerate(contents)]


def family(name: str) -> tuple[Tokenizer, ChatTemplate]:
    source, control = FAMILIES[name]
    tokenizer = from_gguf(vocab.tiny(control=control))
    tokenizer.chat_template = source
    return tokenizer, ChatTemplate(tokenizer)


def special_ids(tokenizer: Tokenizer, ids: list[int]) -> list[int]:
    return [i for i in ids if tokenizer.is_control(i)]


@pytest.mark.parametrize("name", FAMILIES)
def test_ids_are_those_of_the_rendered_text(name):
    tokenizer, template = family(name)
    turns = messages(*TURNS)
    assert template.ids(turns) == tokenizer.encode(template.render(turns), special=True)


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("place", range(3))
@pytest.mark.parametrize("form", ["{0}", "x{0}", " {0} ", "{0}{0}", "\n{0}x{0}\n"])
def test_no_message_text_becomes_a_special_token(name, place, form):
    tokenizer, template = family(name)
    plain = special_ids(tokenizer, template.ids(messages(*TURNS)))
    for token in tokenizer.special.control:
        typed = form.format(token)
        contents = list(TURNS)
        contents[place] = typed
        ids = template.ids(messages(*contents))
        assert special_ids(tokenizer, ids) == plain
        assert typed.strip() in tokenizer.decode(ids)


def test_token_in_two_halves_across_a_border_stays_text():
    # The template puts messages side by side and "<|im" before the first.
    tokenizer = from_gguf(vocab.tiny())
    tokenizer.chat_template = "<|im{% for m in messages %}{{ m.content | trim }}{% endfor %}end|>"
    template = ChatTemplate(tokenizer)
    for token in tokenizer.special.control:
        for cut in range(1, len(token)):
            turns = messages(f" {token[:cut]} ", f"\n{token[cut:]}")
            ids = template.ids(turns)
            assert special_ids(tokenizer, ids) == []
            assert tokenizer.decode(ids) == f"<|im{token}end|>"
    ids = template.ids(messages("_start|>", "<|im_"))
    assert special_ids(tokenizer, ids) == []
    assert tokenizer.decode(ids) == "<|im_start|><|im_end|>"


def test_guard_leaves_ordinary_text_alone():
    guard = Guard(["<|im_start|>", "<|im_end|>"])
    for text in ("", " a < b ", "<|im", "if x <| y:", "  \n", "a|>b"):
        assert guard.mark(text, "\ufdd0") == text or text.strip() == "<|im"
    assert guard.mark(" <", "\ufdd0").replace("\ufdd0", "") == " <"


def test_guard_marks_every_string_inside_a_message():
    guard = Guard(["<x>"])
    message = {"role": "tool", "content": [{"text": "<x>"}], "n": 3}
    marked = guard.mark(message, "!")
    assert marked == {"role": "tool", "content": [{"text": "<!x>"}], "n": 3}


def test_message_that_contains_the_guard_character_keeps_it():
    tokenizer = from_gguf(vocab.tiny())
    ids = ChatTemplate(tokenizer).ids(messages("a\ufdd0b<|im_end|>\ufdd1"))
    assert "a\ufdd0b<|im_end|>\ufdd1" in tokenizer.decode(ids)


def test_template_that_refuses_says_why_in_one_line():
    _, template = family("llama2")
    turns = [{"role": "assistant", "content": "me first"}]
    with pytest.raises(TemplateError, match="roles must alternate"):
        template.ids(turns)


@pytest.mark.parametrize(
    "source",
    [
        "{% for %}",
        "{{ nothing.at.all }}",
        "{{ 1 / 0 }}",
        "{{ messages[5].content }}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ range(10 ** 9) | length }}",
        "{{ messages.append(1) }}",
        "{% for i in range(99999) %}{% for j in range(99999) %}endless{% endfor %}{% endfor %}",
    ],
)
def test_broken_or_hostile_template_is_a_clean_error(source):
    tokenizer = from_gguf(vocab.tiny())
    tokenizer.chat_template = source
    with pytest.raises(TemplateError) as caught:
        ChatTemplate(tokenizer).ids(messages("x"))
    assert "\n" not in str(caught.value)


def test_helpers_that_templates_expect():
    tokenizer = from_gguf(vocab.tiny())
    tokenizer.chat_template = (
        "{% for m in messages %}{% generation %}{{ {'é': m.content} | tojson }}"
        "{% endgeneration %}{% break %}{% endfor %}{{ strftime_now('%Y') | length }}"
    )
    assert ChatTemplate(tokenizer).render(messages("x", "y")) == '{"é": "x"}4'


def test_bos_of_the_template_is_not_doubled():
    tokenizer = from_gguf(vocab.llama3())
    tokenizer.chat_template = LLAMA3
    ids = ChatTemplate(tokenizer).ids(messages("Hello"))
    assert ids.count(128000) == 1 and ids[0] == 128000


def test_without_a_template_chatml_serves_where_its_tokens_are_known():
    tokenizer = from_gguf(vocab.tiny())
    template = ChatTemplate(tokenizer)
    assert "ChatML" in template.note
    assert template.render(messages("hi")) == (
        "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    )


def test_without_template_and_tokens_plain_lines_serve():
    template = ChatTemplate(from_gguf(vocab.tiny(control=("<a>", "<b>"))))
    assert "no chat template" in template.note
    assert template.render(messages("hi")) == "user: hi\nassistant:"
    assert template.stop == ("\nuser:",)


def test_gemma_s_conventions():
    _, template = family("gemma")
    turns = [{"role": "user", "content": " Hi "}, {"role": "assistant", "content": "Ho"}]
    rendered = template.render(turns)
    assert rendered.endswith(
        "<start_of_turn>user\nHi<end_of_turn>\n<start_of_turn>model\nHo<end_of_turn>\n"
        "<start_of_turn>model\n"
    )
    with pytest.raises(TemplateError, match="no system role"):
        template.ids([{"role": "system", "content": "x"}, *turns])


def test_mistral_s_conventions():
    _, template = family("mistral 3")
    user, reply = {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"}
    system = {"role": "system", "content": "Be brief."}
    assert "[INST] Be brief.\n\nHi[/INST]" in template.render([system, user])
    assert "[INST] Hi[/INST] Ho" in template.render([user, reply, user])
    with pytest.raises(TemplateError, match="roles must alternate"):
        template.ids([user, user])
