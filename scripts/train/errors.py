"""What the training scripts refuse: one line, and what to do about it."""

from pathlib import Path


class TrainError(Exception):
    """Something that was asked for cannot be done. `status` is 2 where the command line is at fault."""

    def __init__(self, message: str, hint: str, status: int = 1) -> None:
        super().__init__(message)
        self.hint = hint
        self.status = status


def read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise TrainError(f"{path}: expected UTF-8 text: {error}", "is it the right file?") from None
