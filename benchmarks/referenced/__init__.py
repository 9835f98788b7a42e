"""The programs that references.py runs, apart from those of the examples, the clinic and the other benchmarks."""
