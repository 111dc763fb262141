"""Reads pages of metrics, for the tests of what they tell."""

from __future__ import annotations

import http.client

from prometheus_client.parser import text_string_to_metric_families

Series = tuple[str, frozenset[tuple[str, str]]]


class Page:
    """The values of a page, by name and labels."""

    def __init__(self, text: str) -> None:
        self.families = {each.name: each for each in text_string_to_metric_families(text)}
        self.values: dict[Series, float] = {
            (sample.name, frozenset(sample.labels.items())): sample.value
            for family in self.families.values()
            for sample in family.samples
        }

    def __getitem__(self, name: str) -> float:
        """The one value of a name, whatever its labels."""
        (found,) = (value for (each, _), value in self.values.items() if each == name)
        return found

    def by(self, name: str, label: str) -> dict[str, float]:
        """The values of a name that are not 0, by one of their labels."""
        return {
            dict(labels)[label]: value
            for (each, labels), value in self.values.items()
            if each == name and value
        }

    @property
    def names(self) -> set[str]:
        return {name for name, _ in self.values}


def get(address: str, path: str, key: str | None = None) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection(address, timeout=10)
    try:
        headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        connection.request("GET", path, headers=headers)
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()


def read_page(address: str, key: str | None = None) -> Page:
    status, body = get(address, "/metrics", key)
    assert status == 200, body
    return Page(body.decode())
