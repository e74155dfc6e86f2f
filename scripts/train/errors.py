"""What the training scripts refuse: one line, and what to do about it."""


class TrainError(Exception):
    """Something that was asked for cannot be done. `status` is 2 where the command line is at fault."""

    def __init__(self, message: str, hint: str, status: int = 1) -> None:
        super().__init__(message)
        self.hint = hint
        self.status = status
