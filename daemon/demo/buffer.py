"""The file that the demo's editor has open, before and after an edit."""

BEFORE = '''\
"""A small inventory: parts by name, with how many are in stock and what each costs."""

from dataclasses import dataclass


@dataclass
class Part:
    name: str
    count: int
    price_cents: int

    def value_cents(self) -> int:
        return self.count * self.price_cents


class Inventory:
    """Parts by name. A part is added once; later additions raise its count."""

    def __init__(self) -> None:
        self.parts: dict[str, Part] = {}

    def add(self, name: str, count: int, price_cents: int) -> Part:
        """Adds `count` of a part, or raises the count of one that is there."""
        part = self.parts.get(name)
        if part is None:
            part = Part(name, count, price_cents)
            self.parts[name] = part
        else:
            part.count += count
        return part

    def total_cents(self) -> int:
        """What all parts are worth together."""
        return sum(part.value_cents() for part in self.parts.values())

    def remove(self, name: str, count: int) -> None:
        """Takes `count` of a part out."""
        part = self.parts[name]
'''

# Somebody goes on typing, and renames a word three lines up.
EDITED = BEFORE.replace("Takes `count` of a part out.", "Takes `count` of a part out of stock.") + (
    "        if part.count < count:\n            raise ValueError("
)
