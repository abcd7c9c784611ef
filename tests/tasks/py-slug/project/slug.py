"""File names from titles."""

import re

SEPARATORS = re.compile(r"[^\w]+")


def slugify(title: str) -> str:
    lowered = title.strip().lower()
    slug = SEPARATORS.sub("-", lowered)
    return slug.strip("-")
