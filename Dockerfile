# The README's two commands as a user without root rights. A test compares the commands; no image was built yet.
#     docker build --tag=mics-jax .
#     docker run --interactive --tty mics-jax
FROM python:3.12-slim-bookworm

RUN apt-get update && apt-get install --yes --no-install-recommends git make && rm -rf /var/lib/apt/lists/*
RUN useradd --create-home trainer
USER trainer

WORKDIR /home/trainer/mics-jax
COPY --chown=trainer . .
RUN make train
RUN make test

CMD ["bash"]
