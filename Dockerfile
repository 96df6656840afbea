# Potluck in an image. CPU:   docker build -t potluck .
#                      CUDA:  docker build -t potluck-cuda --build-arg TORCH=cu126 .
# Without torch, for jobs that only use queues:  docker build -t potluck-fleet --build-arg TORCH=none .
FROM python:3.12-slim
ARG TORCH=cpu
RUN useradd --create-home --uid 10001 potluck
COPY pyproject.toml README.md LICENSE constraints.txt /src/
COPY src /src/src
# pip finds torch installed, or is told to leave it out: the wheel itself needs it only for training.
RUN pip install --no-cache-dir --upgrade pip hatchling \
 && if [ "$TORCH" != none ]; then \
      pip install --no-cache-dir torch --index-url "https://download.pytorch.org/whl/$TORCH" \
      && pip install --no-cache-dir /src; \
    else \
      python -c "import tomllib; print('\n'.join(d for d in tomllib.load(open('/src/pyproject.toml', 'rb'))['project']['dependencies'] if not d.startswith('torch')))" > /tmp/needs \
      && pip install --no-cache-dir -r /tmp/needs && pip install --no-cache-dir --no-deps /src; \
    fi \
 && rm -rf /src
USER potluck
WORKDIR /work
ENTRYPOINT []
CMD ["potluck", "--help"]
