.PHONY: setup demo test check protos bench

setup:
	.ci/setup

demo: setup
	.venv/bin/python -m benchmarks.demo

test: setup
	.ci/test

check: setup
	.ci/check

protos: setup
	PATH=$(CURDIR)/.venv/bin:$$PATH .ci/genproto

bench: setup
	.venv/bin/python -m benchmarks.tiny
