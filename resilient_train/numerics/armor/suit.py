"""The armor of a run: which operations wear it, and how to find them again after a resume."""

from __future__ import annotations

from dataclasses import dataclass, field

from resilient_train.numerics.armor import functions
from resilient_train.numerics.armor.errors import CannotArmor
from resilient_train.numerics.armor.seams import Seam


@dataclass(frozen=True, slots=True)
class Plate:
    """One armored operation. Found again by file, function, text and count, since people edit between resumes."""

    file: str
    function: str  # its qualified name
    text: str  # of the line, stripped
    count: int  # of the lines with that text in the function, this is the one: from 0
    line: int
    op: str  # as torch names the function


@dataclass(slots=True)
class Armor:
    """Puts armor around operations in the user's own code, which runs on unchanged wherever nothing breaks.

    What was compiled is compiled anew when it is called next. A process that was started before, such as a worker of a
    data loader, keeps what it has.
    """

    plates: list[Plate] = field(default_factory=list)

    def put_on(self, file: str, line: int, op: str) -> Plate:
        """Armor an operation at a line, as a traceback names both; with an empty `op` all that is computed there."""
        worn = [plate for plate in self.plates if (plate.file, plate.line, plate.op) == (file, line, op)]
        if worn:
            return worn[0]
        source, function = functions.put_on(file, Seam(line, op))
        text = source.lines[line - 1].strip()
        same = source.lines_with(function, text)
        plate = Plate(file, function, text, same.index(line), line, op)
        self.plates.append(plate)
        return plate

    def check(self, file: str, line: int, op: str) -> None:
        """Raise CannotArmor if `put_on` would; nothing changes, and nothing is compiled anew."""
        functions.check(file, Seam(line, op))

    def put_on_again(self, plate: Plate) -> Plate:
        """Armor what a plate of an earlier process was about, wherever its line is by now."""
        source = functions.source_of(functions.functions_of(plate.file))
        lines = source.lines_with(plate.function, plate.text)
        if plate.count >= len(lines):
            raise CannotArmor(f"{plate.function} in {plate.file} has no such line any more: {plate.text}")
        return self.put_on(source.filename, lines[plate.count], plate.op)

    def take_off(self, plate: Plate | None = None) -> None:
        """Take one plate off, or all of them."""
        unwanted = list(self.plates) if plate is None else [plate]
        for file in dict.fromkeys(worn.file for worn in unwanted):
            functions.take_off(file, [Seam(worn.line, worn.op) for worn in unwanted if worn.file == file])
        for worn in unwanted:
            self.plates.remove(worn)
