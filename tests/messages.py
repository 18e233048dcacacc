"""The one form of message about an array argument."""


def about(name: str) -> str:
    """A pattern for errors that name an argument, what was expected and what came."""
    return rf"^`({name})`: expected .*got"
