"""As much of PromQL as the dashboards of others need: what an expression selects and groups by."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

Labels = Mapping[str, str]
Series = tuple[str, Labels]  # a name with its labels

_RANGE = re.compile(r"\[[^\]]*\]")
_GROUPING = re.compile(r"\bby\s*\(([^)]*)\)")
_AGGREGATION = re.compile(r"\b(sum|avg|max|min|count|histogram_quantile)\b")
_SELECTOR = re.compile(r"([a-zA-Z_:][\w:]*)\s*(\{[^}]*\})?\s*(\()?")
_MATCHER = re.compile(r'(\w+)\s*(=~|!~|!=|=)\s*"([^"]*)"')
_KEYWORDS = {"or", "and", "by", "on"}


@dataclass(frozen=True)
class Selector:
    name: str
    matchers: tuple[tuple[str, str, str], ...]

    def takes(self, series: Series) -> bool:
        name, labels = series
        return name == self.name and all(
            _matches(labels.get(label, ""), operator, value)
            for label, operator, value in self.matchers
        )


def _matches(found: str, operator: str, value: str) -> bool:
    is_equal = found == value if len(operator) == 1 or operator == "!=" else None
    if is_equal is None:
        is_equal = re.fullmatch(value, found) is not None
    return is_equal is not operator.startswith("!")


class Expression:
    """`variables` are Grafana's, by their names."""

    def __init__(self, text: str, variables: Labels) -> None:
        text = re.sub(r"\$(\w+)", lambda found: variables.get(found[1], found[0]), text)
        text = _RANGE.sub("", text)
        self.groups = {
            label.strip() for labels in _GROUPING.findall(text) for label in labels.split(",")
        }
        self._text = _GROUPING.sub(" ", text)
        self.selectors = list(self._found())

    def _found(self) -> Iterator[Selector]:
        for name, matchers, call in _SELECTOR.findall(self._text):
            if not call and name not in _KEYWORDS:
                yield Selector(name, tuple(_MATCHER.findall(matchers)))

    def missing(self, every: Iterable[Series]) -> list[str]:
        """Names of what it selects that no series answers, with every label it groups by."""
        series = list(every)
        found = [
            [labels for each in series if s.takes(each) and (labels := each[1])]
            for s in self.selectors
        ]
        names = [
            selector.name
            for selector, taken in zip(self.selectors, found, strict=True)
            if not any(self.groups <= labels.keys() for labels in taken)
        ]
        if not names and "/" in self._text and not _AGGREGATION.search(self._text):
            left, right = ({frozenset(labels.items()) for labels in taken} for taken in found)
            names = [] if left & right else [each.name for each in self.selectors]
        return names
