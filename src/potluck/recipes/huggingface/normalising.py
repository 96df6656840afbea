"""What makes a script's texts alike before they become tokens; kept in the tokenizer's file, for all peers.

bengali: one form for letters that Unicode can write in two ways (NFC: ো, য়, ড়, ঢ়), no invisible characters but the
zero-width joiners, which change how conjuncts are read; a bar typed for the danda is a danda; one space for several.
Accents are not stripped: in this script the vowel signs are accents to Unicode.
"""

from __future__ import annotations

from typing import Any

from potluck.errors import ConfigurationError

INVISIBLE = "[\u00ad\u200b\u200e\u200f\u2060\ufeff]"  # soft hyphen, zero-width space, marks of direction, byte order
AFTER_BENGALI = r"(?<=[\u0980-\u09ff])\s*\|"
NAMES = ("", "nfc", "bengali")


def normaliser(name: str) -> Any:
    """As the tokenizers library has it; None for the empty name."""
    from tokenizers import Regex, normalizers

    if name not in NAMES:
        raise ConfigurationError(f"normaliser={name!r}: choose one of {', '.join(filter(None, NAMES))}, or none")
    if not name:
        return None
    common = [normalizers.NFC(), normalizers.Replace(Regex(INVISIBLE), "")]
    if name == "bengali":
        common.append(normalizers.Replace(Regex(AFTER_BENGALI), "।"))
    return normalizers.Sequence([*common, normalizers.Replace(Regex(r"[ \t\u00a0]+"), " ")])
