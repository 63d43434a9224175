"""One BERT with each attention implementation of transformers, and with PyTorch's compiler."""

from __future__ import annotations

from small import TRANSFORMERS, bert, judge, needs

REQUIREMENTS = TRANSFORMERS


def main() -> None:
    needs("transformers", *TRANSFORMERS)
    judge("transformers, sdpa", bert(), None, way="sdpa")
    judge("transformers, compiled by PyTorch", bert(), None, way="compile")
    judge("transformers, bfloat16, sdpa compared with eager", bert().bfloat16(), bert("sdpa").bfloat16())


if __name__ == "__main__":
    main()
