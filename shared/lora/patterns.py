"""Regular expressions of an adapter's config, matched with names of modules in bounded time and memory.

They are somebody else's. Matching one may take for ever, and even compiling one more memory than there is.
"""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from typing import Any, Final, TypeVar

import regex

from shared.errors import AdapterError

T = TypeVar("T")

#: Characters of one pattern, and of what becomes of it when it is compiled: `(a{9}){9}` has 81 of its `a`.
MAX_CHARACTERS, _MAX_COMPILED = 8192, 1_000_000
#: Seconds of one match, and of all that is done for one config, on this thread's clock. One that names each of 560
#: modules by itself takes a fifth of a second of a slow CPU.
_MATCH_S, _TOTAL_S = 0.2, 5.0
#: Counts of a repetition, and what else braces may be: `regex` has more than PEFT's `re`.
_COUNT: Final = re.compile(r"\{(\d+)")
_BRACE: Final = re.compile(r"\{(?!\d|,\d)")
#: What may follow `(?`: nothing that calls itself, or that changes how the rest reads.
_EXTENSION: Final = re.compile(r"\(\?(?!:|=|!|<=|<!|P<)")
#: A pattern in which nothing but dots stands for something else: it can only match what ends as it does.
_PLAIN: Final = re.compile(r"[A-Za-z0-9_.-]*?(?P<tail>[A-Za-z0-9_-]+)")


class Patterns:
    """The patterns of one config, each compiled once, and their answers. All methods raise AdapterError for a pattern
    that is no regular expression, or that is too long, too deep, or too slow.

    Args:
        file: the config's, for messages.
    """

    def __init__(self, file: str) -> None:
        self._file = file
        self._left_s = _TOTAL_S
        self._compiled: dict[str, Any] = {}
        self._tails: dict[str, str] = {}
        self._found: dict[tuple[str, str], Any] = {}

    def first(self, field: str, patterns: Mapping[str, T], module: str, default: T) -> T:
        """The value of the first pattern that matches a module's name or the end of it behind a dot, as PEFT has it."""
        key = field, module
        if key not in self._found:
            likely = (pattern for pattern in patterns if module.endswith(self._tail(field, pattern)))
            found_by = next((each for each in likely if self.matches(field, each, module, ends=True)), None)
            self._found[key] = default if found_by is None else patterns[found_by]
        found: T = self._found[key]
        return found

    def matches(self, field: str, pattern: str, module: str, *, ends: bool = False) -> bool:
        """Whether a pattern matches a module's whole name; with `ends`, or the end of it behind a dot."""
        began = time.thread_time()
        try:
            self._tail(field, pattern)
            compiled = self._compile(rf"(.*\.)?({pattern})" if ends else pattern)
            found = compiled.fullmatch(module, timeout=_MATCH_S)
        except regex.error as error:
            raise self._wrong(field, str(error)) from None
        except RecursionError:
            raise self._wrong(field, "a pattern is nested too deeply") from None
        except TimeoutError:
            raise self._wrong(field, "a pattern takes too long") from None
        self._left_s -= time.thread_time() - began
        if self._left_s < 0:
            raise self._wrong(field, "the config's patterns take too long")
        return found is not None

    def _tail(self, field: str, pattern: str) -> str:
        """What a name must end with if a pattern is to match it; the pattern is looked at when it is first met."""
        if pattern not in self._tails:
            if len(pattern) > MAX_CHARACTERS:
                raise self._wrong(field, f"a pattern has {len(pattern)} characters, {MAX_CHARACTERS} are allowed")
            if _EXTENSION.search(pattern) is not None:
                raise self._wrong(field, "of groups that begin with (? only (?: (?= (?! (?<= (?<! (?P< are served")
            if _BRACE.search(pattern) is not None:
                raise self._wrong(field, "of braces only counts such as {2} or {1,3} are served")
            if _compiled_size(pattern) > _MAX_COMPILED:
                raise self._wrong(field, "a pattern repeats too much")
            plain = _PLAIN.fullmatch(pattern)
            self._tails[pattern] = plain["tail"] if plain else ""
        return self._tails[pattern]

    def _compile(self, pattern: str) -> Any:
        if pattern not in self._compiled:
            self._compiled[pattern] = regex.compile(pattern, cache_pattern=False)
        return self._compiled[pattern]

    def _wrong(self, field: str, why: str) -> AdapterError:
        return AdapterError(f"{self._file}: {field}: {why}")


def _compiled_size(pattern: str) -> int:
    """About the most characters of a pattern when it is compiled: as if all of its repetitions were nested."""
    size = len(pattern) << min(pattern.count(")+"), 64)
    for count in _COUNT.findall(pattern):
        size *= int(count[:9]) + 1
    return size
