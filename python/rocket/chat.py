"""A fuel's chat template, rendered as Hugging Face's tools render it."""

import datetime
import json
import re
from pathlib import Path
from typing import Any, NoReturn

import jinja2
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from rocket.errors import reason_of
from rocket.failures import fuel_error
from rocket.fuel import read_json
from rocket.inputs import read_regular

MAX_ADDED = 16 << 20  # characters that a template may put around the messages

Message = dict[str, Any]

_SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class _TemplateError(Exception):
    """raise_exception() was called in the template."""


class _TooLongError(Exception):
    """The template's output has no end in sight."""


def _raise_exception(message: str) -> NoReturn:
    raise _TemplateError(message)


def _strftime_now(format: str) -> str:
    return datetime.datetime.now().strftime(format)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes HTML characters.
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


class ChatTemplate:
    """From chat_template.jinja, or from tokenizer_config.json.

    Templates are not trusted: they run in a sandbox.
    """

    def __init__(self, fuel: str | Path) -> None:
        folder = Path(fuel)
        config = read_json(folder / "tokenizer_config.json")
        self.file, source = self._find(folder, config)
        self._names = {name: _content(config.get(name)) for name in _SPECIAL_NAMES}
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols]
        )
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise fuel_error(
                f"{self.file}: broken chat template, line {error.lineno}: {error.message}",
                "correct the template, or give a plain prompt without --chat",
            ) from error

    @staticmethod
    def _find(folder: Path, config: dict[str, Any]) -> tuple[Path, str]:
        file = folder / "chat_template.jinja"
        try:
            return file, re.sub("\r\n?", "\n", read_regular(file).decode())
        except FileNotFoundError:
            pass
        except OSError as error:
            raise fuel_error(
                f"{file}: cannot be read: {reason_of(error)}", "check the file and its permissions"
            ) from error
        except UnicodeDecodeError as error:
            raise fuel_error(
                f"{file}: expected UTF-8 text, found byte 0x{error.object[error.start]:02x} at {error.start}",
                "download the file again",
            ) from error
        found = config.get("chat_template")
        if isinstance(found, list):  # named templates
            named = {entry.get("name"): entry.get("template") for entry in found if isinstance(entry, dict)}
            found = named.get("default")
        if not isinstance(found, str):
            raise fuel_error(
                f"{folder}: no chat template, neither chat_template.jinja nor in tokenizer_config.json",
                "give a plain prompt without --chat",
            )
        return folder / "tokenizer_config.json", found

    def render(self, messages: list[Message], add_generation_prompt: bool = True, **more: Any) -> str:
        names = {name: value for name, value in self._names.items() if value is not None}
        try:
            return self._pieces(
                {"messages": messages, "add_generation_prompt": add_generation_prompt, **names, **more}
            )
        except _TooLongError:
            raise fuel_error(
                f"{self.file}: expected a chat template that adds at most {MAX_ADDED >> 20} MiB, "
                "found one that goes on",
                "correct the template, or give a plain prompt without --chat",
            ) from None
        except _TemplateError as error:
            raise fuel_error(
                f"{self.file}: the chat template refuses: {error}", "change the messages"
            ) from error
        except Exception as error:  # whatever the template does wrong in the sandbox
            raise fuel_error(
                f"{self.file}: the chat template failed: {type(error).__name__}: {error}",
                "correct the template, or give a plain prompt without --chat",
            ) from error

    def _pieces(self, values: dict[str, Any]) -> str:
        room = MAX_ADDED + 2 * sum(len(str(message)) for message in values["messages"])
        pieces: list[str] = []
        for piece in self._template.generate(values):
            room -= len(piece)
            if room < 0:
                raise _TooLongError
            pieces.append(piece)
        return "".join(pieces)

    def generation_prompt(self, messages: list[Message]) -> str:
        """What the template puts after the messages to open the answer."""
        whole = self.render(messages)
        bare = self.render(messages, add_generation_prompt=False)
        return whole[len(bare) :] if whole.startswith(bare) else ""


def _content(token: Any) -> str | None:
    if isinstance(token, dict):
        token = token.get("content")
    return token if isinstance(token, str) else None


def ends_inside_thinking(text: str) -> bool:
    """Whether a text's last <think> is still open."""
    return text.rfind("<think>") > text.rfind("</think>")
