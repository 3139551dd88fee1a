# The workbench with all its packages: `docker build -t stamp . && docker run --rm stamp` runs the tour.
# To keep what it computes: `docker run --rm -v "$PWD/figures:/stamp/figures" stamp make tour`.
FROM python:3.11-slim
RUN apt-get update && apt-get install --yes --no-install-recommends git make && rm -rf /var/lib/apt/lists/* \
    && useradd --create-home --uid 1000 stamp && mkdir /stamp && chown stamp /stamp
USER stamp
WORKDIR /stamp
COPY --chown=stamp . .
RUN make .venv/.ready
CMD ["make", "tour"]
