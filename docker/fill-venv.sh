# Makes the Python environment VENV from the hash lock LOCK, for use in an image: fill-venv.sh VENV LOCK
#
# Runs in a build stage that has pip in /opt/pip. The result is the same to the byte for the same lock and interpreter.
set -eu
venv=$1 lock=$2

# Where builds go through a proxy with its own certificate authority, the host lends its bundle for this step.
if [ -s /run/secrets/ca ]; then export PIP_CERT=/run/secrets/ca SSL_CERT_FILE=/run/secrets/ca; fi

# As in the Makefile: what the locks hold and nothing else. First build.lock, beside LOCK: it builds what has no wheel.
python3 -m venv --without-pip "$venv"
for requirements in "$(dirname "$lock")/build.lock" "$lock"; do
  /opt/pip/bin/pip --python "$venv/bin/python" install --quiet --no-compile \
    --require-hashes --no-deps --use-pep517 --no-build-isolation --requirement "$requirements"
done

# A fifth of what was installed serves to build or test against it; TensorFlow asks for libclang and never imports it.
packages=$(echo "$venv"/lib/python3*/site-packages)
find "$packages" -type d \( -name '*.dist-info' -prune -o \( -name include -o -name tests \) -prune -exec rm -rf {} + \)
find "$packages" \( -name '*.h' -o -name libclang.so \) -type f -delete

# The root is read-only in a container: without bytecode here, every start would compile TensorFlow again. Checked
# against neither time nor source, so that no date gets in. By one process: with several, some files' bytes depend on
# which of them got which file before.
"$venv/bin/python" -m compileall -q --invalidation-mode unchecked-hash "$packages"
find "$venv" -exec touch --no-dereference --date=@0 {} +
