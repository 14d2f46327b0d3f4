"""docs/troubleshooting.md: what it quotes is in the source, and what the source raises or logs is in it."""

import re
from pathlib import Path

import pytest
from messages import FILLED, Message, literals, messages, raised, stands_for

PAGE = (Path(__file__).parents[2] / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
CLASSES = {"ValueError", "TypeError", "RuntimeError"}
FEWEST = 6  # letters and signs that an entry has itself: fewer would stand for anything


def quoted(page):
    """The messages of the tables' first columns."""
    lines = [line for line in page.splitlines() if line.startswith("| ")]
    rows = [line for line in lines if not re.match(r"\| (message|reason|error) ", line)]
    return [one for row in rows for one in re.findall(r"`([^`]+)`", row.split(" | ")[0])]


def own_words(text):
    return text.replace(FILLED, "").strip()


def unexplained(found, page):
    """Those of the messages that no entry of the page stands for; of what is wholly filled in there are none."""
    entries = [one for one in quoted(page) if len(own_words(one)) >= FEWEST]
    told = [one for one in found if len(own_words(one.text)) >= FEWEST]
    return [one for one in told if not any(stands_for(entry, one.text) for entry in entries)]


def test_every_message_of_the_page_is_in_the_source():
    said = literals()
    names = raised() | CLASSES
    rotten = [one for one in quoted(PAGE) if one not in names and not any(stands_for(one, text) for text in said)]
    assert rotten == [], "correct docs/troubleshooting.md, or take the entry out"


def test_every_message_of_the_source_is_on_the_page():
    found = list(messages())
    assert len(found) > 400
    missing = [f"{one.place}: {one.by}: {one.text}" for one in unexplained(found, PAGE)]
    assert missing == [], "write an entry with cause and cure into docs/troubleshooting.md"


def test_every_class_of_error_is_on_the_page():
    names = raised()
    assert {"SettingsError", "CollectiveError", "CheckpointError"} <= names
    assert [name for name in sorted(names) if f"`{name}`" not in PAGE] == []


@pytest.mark.parametrize("text", ["the moon is full: wait", f"{FILLED} is haunted by {FILLED} ghosts"])
def test_a_message_without_an_entry_is_found(text):
    assert [one.text for one in unexplained([Message("here:1", "ValueError", text)], PAGE)] == [text]
    assert not any(stands_for(text, one) for one in literals())
