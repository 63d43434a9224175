"""The page."""


def page(data: object) -> str:
    raise NotImplementedError
