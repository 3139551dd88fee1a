# The workbench with all its packages: `docker build -t stamp . && docker run --rm stamp` runs the tour.
# To keep what it computes: `docker run --rm -v "$PWD/figures:/stamp/figures" stamp make tour`.
FROM python:3.11-slim
RUN apt-get update && apt-get install --yes --no-install-recommends git make && rm -rf /var/lib/apt/lists/*
WORKDIR /stamp
COPY . .
RUN make .venv/.ready && git config --global --add safe.directory /stamp
CMD ["make", "tour"]
