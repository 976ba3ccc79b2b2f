# Runs in the guest as its only job: sets the machine up, runs the command, reports its status.
# The host reads /run/control/{status,stdout,stderr}; what is printed here goes to the console log.
# Words in `status`, one a line: up, ready, timeout, exit N.

control=/run/control
# `settings` gives: timeout_s, out_dir (a directory that exists on the host), rig (yes or no).
. $control/settings
report() { echo "$*" >> $control/status; }
fail() {
    echo "run.sh: $*"
    report failed "$*"
    exit 1
}

report up
export PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
/bin/busybox hostname rerail-guest
# Registered memory counts as locked; many sockets and devices count as files.
ulimit -l unlimited
ulimit -n 65536
ip link set lo up
mount -t 9p -o trans=virtio,version=9p2000.L,msize=1048576,cache=none out "$out_dir" ||
    fail "cannot mount the share for results at $out_dir"
if [ "$rig" = yes ]; then
    bash -eu $control/rig.sh || fail "the two-host rig could not be set up"
fi
report ready

# The command writes into pipes, as it would on a terminal's other side, and `cat` carries that to
# the host at once. With files in place of pipes, whoever re-opens /dev/stderr would truncate it.
mkfifo /run/stdout /run/stderr
cat < /run/stdout > $control/stdout &
pump_out=$!
cat < /run/stderr > $control/stderr &
pump_err=$!

started=$(cut -d. -f1 /proc/uptime)
timeout --kill-after=5 "$timeout_s" bash $control/command.sh \
    < /dev/null > /run/stdout 2> /run/stderr
status=$?
took=$(($(cut -d. -f1 /proc/uptime) - started))
# 124 is what `timeout` gives after TERM, 137 after KILL; a command may also end so by itself.
if [ "$took" -ge "$timeout_s" ] && { [ $status = 124 ] || [ $status = 137 ]; }; then
    report timeout
    status=124
fi

# The pumps end with the last holder of the pipes. A process that the command left behind may keep
# them open for ever, so give up on it after two seconds: what it has written by then is through.
for _ in $(seq 20); do
    kill -0 $pump_out 2> /dev/null || kill -0 $pump_err 2> /dev/null || break
    sleep 0.1
done
sync -f "$out_dir"
report exit $status
