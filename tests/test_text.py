"""Tokenizers and chat templates: text at complete characters, as Hugging Face's tools have it."""

import json
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

from rocket import FuelError, InputError
from rocket.chat import ChatTemplate, ends_inside_thinking
from rocket.random_fuel_config import tokenizer_json
from rocket.text_ids import LINE, ids_of_file, ids_of_text, pieces
from rocket.tokenizer import Tokenizer

REPLACEMENT = "�"


@pytest.fixture(scope="module")
def fuel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A byte-level tokenizer with special tokens, as the random fuels have it."""
    folder = tmp_path_factory.mktemp("text")
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer_json(1024)))
    return folder


@pytest.fixture(scope="module")
def tokenizer(fuel: Path) -> Tokenizer:
    return Tokenizer(fuel)


def stream_of(tokenizer: Tokenizer, ids: list[int]) -> list[str]:
    """What is printed after each token, then what the end adds."""
    stream = tokenizer.stream()
    return [*(stream.push(i) for i in ids), stream.finish()]


@given(st.text(max_size=60))
def test_any_text_survives(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text)
    assert "".join(stream_of(tokenizer, ids)) == text == tokenizer.decode(ids)


@given(st.lists(st.integers(0, 1023), max_size=40))
def test_any_tokens_stream_as_the_library_decodes_them(tokenizer: Tokenizer, ids: list[int]) -> None:
    whole = tokenizers.Tokenizer.from_file(str(tokenizer.file)).decode(ids, skip_special_tokens=True)
    assert "".join(stream_of(tokenizer, ids)) == whole


def test_characters_over_several_tokens_come_out_whole(tokenizer: Tokenizer) -> None:
    ids = list("é€😀".encode())  # the tokenizer's first 256 ids are the bytes
    assert stream_of(tokenizer, ids) == ["", "é", "", "", "€", "", "", "", "😀", ""]


def test_bytes_that_are_no_text_show_once_it_is_certain(tokenizer: Tokenizer) -> None:
    assert stream_of(tokenizer, [0xFF, 0x41]) == [REPLACEMENT, "A", ""]
    assert stream_of(tokenizer, [0xE2, 0x82, 0x41]) == ["", "", REPLACEMENT + "A", ""]
    assert stream_of(tokenizer, [0x41, 0xE2, 0x82]) == ["A", "", "", REPLACEMENT]


def test_special_tokens_are_not_text(tokenizer: Tokenizer) -> None:
    special, think = tokenizer.id_of("<|user|>"), tokenizer.id_of("<think>")
    assert special in tokenizer.special_ids
    assert think not in tokenizer.special_ids
    assert tokenizer.decode([65, special, think, 66]) == "A<think>B"
    assert tokenizer.decode([65, special], skip_special=False) == "A<|user|>"


def test_a_special_token_between_the_bytes_of_a_character(tokenizer: Tokenizer) -> None:
    special = tokenizer.id_of("<|user|>")
    assert "".join(stream_of(tokenizer, [0xC3, special, 0xA9])) == "é"


def test_text_that_is_no_unicode_is_refused(tokenizer: Tokenizer) -> None:
    with pytest.raises(InputError, match="UTF-8"):
        tokenizer.encode("a\udc80")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "not found"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 9\n", "Git LFS pointer"),
        (b"{", "no valid tokenizer"),
        (b"", "no valid tokenizer"),
        (b"\xff\xfe", "no valid tokenizer"),
        (b"{}", "no valid tokenizer"),
    ],
)
def test_broken_tokenizer_files_are_named(tmp_path: Path, content: bytes | None, words: str) -> None:
    if content is not None:
        (tmp_path / "tokenizer.json").write_bytes(content)
    with pytest.raises(FuelError, match=words) as caught:
        Tokenizer(tmp_path)
    assert str(tmp_path / "tokenizer.json") in str(caught.value)
    assert caught.value.hint


def save(folder: Path, inner: tokenizers.Tokenizer) -> Tokenizer:
    inner.save(str(folder / "tokenizer.json"))
    return Tokenizer(folder)


@pytest.fixture
def pieces_tokenizer(tmp_path: Path) -> Tokenizer:
    """In the manner of SentencePiece: a mark for spaces, and bytes for what is not in the vocabulary."""
    words = ["<unk>", "▁", "▁he", "llo", "▁wor", "ld", *(f"<0x{i:02X}>" for i in range(256))]
    inner = tokenizers.Tokenizer(
        models.BPE({w: i for i, w in enumerate(words)}, [], unk_token="<unk>", byte_fallback=True)
    )
    inner.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return save(tmp_path, inner)


def test_other_decoders_keep_their_spaces(pieces_tokenizer: Tokenizer) -> None:
    assert not pieces_tokenizer.is_byte_level
    ids = [pieces_tokenizer.id_of(t) for t in ("▁he", "llo", "▁wor", "ld")]
    assert stream_of(pieces_tokenizer, ids) == ["he", "llo", " wor", "ld", ""]


def test_other_decoders_wait_for_whole_characters(pieces_tokenizer: Tokenizer) -> None:
    ids = [pieces_tokenizer.id_of(f"<0x{b:02X}>") for b in "😀".encode()]
    assert stream_of(pieces_tokenizer, [*ids, pieces_tokenizer.id_of("llo")]) == ["", "", "", "😀", "llo", ""]
    assert stream_of(pieces_tokenizer, ids[:2])[-1] == REPLACEMENT * 2


def test_other_decoders_do_not_wait_for_ever(pieces_tokenizer: Tokenizer) -> None:
    broken = [pieces_tokenizer.id_of("<0xFF>")] * 9
    shown = stream_of(pieces_tokenizer, broken)
    assert "".join(shown) == REPLACEMENT * 9
    assert shown[3] == REPLACEMENT * 4


def test_limits_in_the_file_do_not_cut_prompts(fuel: Path, tmp_path: Path) -> None:
    inner = tokenizers.Tokenizer.from_file(str(fuel / "tokenizer.json"))
    inner.enable_truncation(4)
    inner.enable_padding(length=16)
    assert save(tmp_path, inner).encode("some longer text") == Tokenizer(fuel).encode("some longer text")


def test_opening_tokens(fuel: Path, tmp_path: Path) -> None:
    inner = tokenizers.Tokenizer.from_file(str(fuel / "tokenizer.json"))
    ids = [(t, inner.token_to_id(t)) for t in ("[gMASK]", "<sop>")]
    inner.post_processor = processors.TemplateProcessing(single="[gMASK] <sop> $A", special_tokens=ids)
    tokenizer = save(tmp_path, inner)
    assert tokenizer.opening_ids == [i for _, i in ids]
    assert Tokenizer(fuel).opening_ids == []
    assert tokenizer.encode("abc") == tokenizer.opening_ids + Tokenizer(fuel).encode("abc")


# --- long texts, piece by piece ---


@given(st.text(alphabet="ab \n\r\t.(é1😀", max_size=200), st.integers(1, 40))
def test_pieces_have_the_tokens_of_the_whole(tokenizer: Tokenizer, text: str, size: int) -> None:
    assert tokenizer.splits_at_lines
    file = tokenizer.file.with_name("pieces.txt")
    file.write_bytes(text.encode())
    if tokenizer.encode(text):
        found = ids_of_text(str(file), tokenizer, size)
        assert found.ids.tolist() == tokenizer.encode(text)
        assert found.bytes == len(text.encode())


def test_pieces_are_cut_where_it_is_allowed(tmp_path: Path) -> None:
    file = tmp_path / "t"
    file.write_bytes(b"aaaa\nbb\n\n cc\ndd\n")
    with file.open("rb") as f:
        assert list(pieces(f, LINE, 1)) == [b"aaaa\n", b"bb\n\n cc\n", b"dd\n"]
    with file.open("rb") as f:
        assert list(pieces(f, LINE, 6)) == [b"aaaa\nbb\n\n cc\n", b"dd\n"]
    with file.open("rb") as f:
        assert list(pieces(f, None, 1)) == [file.read_bytes()]


@pytest.mark.parametrize("kind", ["normalizer", "prefix space", "none", "added"])
def test_tokenizers_that_may_join_lines_are_not_cut(fuel: Path, tmp_path: Path, kind: str) -> None:
    inner = tokenizers.Tokenizer.from_file(str(fuel / "tokenizer.json"))
    if kind == "normalizer":
        inner.normalizer = normalizers.NFC()
    elif kind == "prefix space":
        inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    elif kind == "none":
        inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    else:
        inner.add_tokens([tokenizers.AddedToken("\nab", normalized=False)])
    assert not save(tmp_path, inner).splits_at_lines


def test_a_byte_order_mark_is_no_text(tokenizer: Tokenizer, tmp_path: Path) -> None:
    file = tmp_path / "t"
    file.write_bytes(b"\xef\xbb\xbfabc")
    found = ids_of_text(str(file), tokenizer)
    assert (found.ids.tolist(), found.bytes) == (tokenizer.encode("abc"), 3)


@pytest.mark.parametrize(
    "text", ["1,2,3,44", "[1, 2, 3, 44]\n", "1 2\n3\t44", "1,\n2,\n3,\n44\n", " [1,2,3,44 ] "]
)
@pytest.mark.parametrize("size", [1, 3, 100])
def test_ids_in_a_file(tmp_path: Path, text: str, size: int) -> None:
    file = tmp_path / "ids"
    file.write_text(text)
    assert ids_of_file(str(file), size).ids.tolist() == [1, 2, 3, 44]
    assert ids_of_file(str(file), size).ids.dtype == np.int32


# --- chat templates ---


def chat(folder: Path, template: str, config: dict | None = None) -> ChatTemplate:
    (folder / "chat_template.jinja").write_text(template)
    (folder / "tokenizer_config.json").write_text(json.dumps(config or {}))
    return ChatTemplate(folder)


USER = [{"role": "user", "content": "Hi"}]


def test_template_helpers(tmp_path: Path) -> None:
    template = chat(
        tmp_path,
        "{{ bos_token }}{% for m in messages %}{% if loop.index > 1 %}{% break %}{% endif %}\n"
        "{{ m | tojson }}{{ '<é>' | tojson }}{% endfor %}{{ strftime_now('%Y') | length }}{{ eos_token }}",
        {"bos_token": "<s>", "eos_token": {"content": "</s>"}},
    )
    assert template.render(USER * 2) == '<s>{"role": "user", "content": "Hi"}"<é>"4</s>'


def test_template_from_the_tokenizer_config(tmp_path: Path) -> None:
    file = tmp_path / "tokenizer_config.json"
    file.write_text(json.dumps({"chat_template": "A{{ messages[0].content }}"}))
    assert ChatTemplate(tmp_path).render(USER) == "AHi"
    named = [{"name": "tool_use", "template": "no"}, {"name": "default", "template": "B"}]
    file.write_text(json.dumps({"chat_template": named}))
    assert ChatTemplate(tmp_path).render(USER) == "B"


@pytest.mark.parametrize(
    ("template", "words"),
    [
        ("{{ raise_exception('no system role') }}", "refuses: no system role"),
        ("{% for %}", "broken chat template, line 1"),
        ("{{ messages.nothing.there }}", "failed"),
        ("{{ ().__class__.__bases__[0].__subclasses__() }}", "failed: SecurityError"),
        ("{{ messages.append(1) }}", "failed: SecurityError"),
    ],
)
def test_templates_that_fail_say_so(tmp_path: Path, template: str, words: str) -> None:
    with pytest.raises(FuelError, match=words):
        chat(tmp_path, template).render(USER)


def test_a_fuel_without_a_template(tmp_path: Path) -> None:
    with pytest.raises(FuelError, match="no chat template"):
        ChatTemplate(tmp_path)


def test_the_generation_prompt(tmp_path: Path) -> None:
    template = chat(tmp_path, "{{ messages[0].content }}{% if add_generation_prompt %}<a><think>{% endif %}")
    assert template.generation_prompt(USER) == "<a><think>"


@pytest.mark.parametrize(
    ("text", "inside"),
    [("", False), ("a", False), ("<think>a", True), ("<think>a</think>b", False), ("</think><think>", True)],
)
def test_thinking(text: str, inside: bool) -> None:
    assert ends_inside_thinking(text) is inside
