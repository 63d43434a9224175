"""Pickles of PyTorch and PaddlePaddle, read without being run.

A pickle is a program. Here it is neither run nor given to Python's ``pickle``: :mod:`concord.porting.pickles.machine` keeps a stack of its own, on
which a class is no more than its name. What is known to build tensors becomes tensors that say where in the file their numbers lie; any other name
is refused. That happens in a process of its own, without a framework, and with limits of time and memory (:mod:`concord.porting.pickles.reader`).
"""
