"""Armor: a cure put around one guilty operation in the user's own code, which stays as it is.

suit.py      puts it on, takes it off, finds its place again after a resume
functions.py gives the functions that are alive new code, compiled from the same source
seams.py     where on a line that code calls us instead of the operation
mending.py   what we do there: the operation, and then what it broke
leads.py     the slope that takes what broke back to where it works
"""

from resilient_train.numerics.armor.errors import CannotArmor
from resilient_train.numerics.armor.suit import Armor, Plate

__all__ = ["Armor", "CannotArmor", "Plate"]
