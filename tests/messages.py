"""The form of all messages about array arguments."""


def about(name: str) -> str:
    """Return a pattern of errors that name an argument, what was expected and what was got."""
    return rf"^`({name})`: expected .*got"
