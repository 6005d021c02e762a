# Puts what both images need beyond their base into the root: fill-root.sh VENV
#
# Runs in the image itself, as its first layer on the base. What it writes is dated 1970, so that the same input makes the
# same layer.
set -eu
venv=$1

# Bytecode of the standard library, which the official image lacks (0.7 s of every start).
stdlib=$(python3 -c "import sysconfig; print(sysconfig.get_path('stdlib'))")
touch /dev/shm/before
python3 -m compileall -q --invalidation-mode unchecked-hash -x '/(site-packages|tests?)/' "$stdlib"
find "$stdlib" -newer /dev/shm/before -exec touch --no-dereference --date=@0 {} +

# A user; useradd would write the date.
echo 'trainer:x:10001:10001::/tmp:/usr/sbin/nologin' >>/etc/passwd
echo 'trainer:x:10001:' >>/etc/group

mkdir --parents /opt /app
cp --archive "$venv" /opt/venv
touch --date=@0 / /app /etc /etc/group /etc/passwd /opt
