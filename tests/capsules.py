"""Arrays of other libraries, which NumPy does not know."""


class Capsule:
    """An array known only by DLPack."""

    def __init__(self, x):
        self.kept = x

    def __dlpack__(self, **options):
        return self.kept.__dlpack__(**options)

    def __dlpack_device__(self):
        return self.kept.__dlpack_device__()
