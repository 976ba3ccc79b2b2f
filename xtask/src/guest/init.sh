#!/bin/busybox sh
# First process of the guest. Loads the modules, lays a tmpfs over the host's read-only root, mounts
# the writable shares and hands over to run.sh, which comes through the `control` share.
# Busybox only: there is nothing else in the initramfs.
B=/bin/busybox
$B mkdir -p /proc /sys /dev /mnt/lower /mnt/rw /mnt/root
$B mount -t proc proc /proc
$B mount -t sysfs sysfs /sys
$B mount -t devtmpfs devtmpfs /dev
while read -r module options; do
    # Options are words of their own.
    $B insmod "/modules/$module" $options || echo "init: module $module did not load"
done < /modules/order

# msize: fewer round trips for large files. cache=loose: nobody changes the host's files meanwhile,
# or at least nobody whose changes the guest has to see.
$B mount -t 9p -o trans=virtio,version=9p2000.L,msize=1048576,cache=loose,ro host /mnt/lower
$B mount -t tmpfs -o size=50% tmpfs /mnt/rw
$B mkdir -p /mnt/rw/upper /mnt/rw/work
$B mount -t overlay -o lowerdir=/mnt/lower,upperdir=/mnt/rw/upper,workdir=/mnt/rw/work overlay \
    /mnt/root

R=/mnt/root
$B mount -t proc proc $R/proc
$B mount -t sysfs sysfs $R/sys
$B mount -t devtmpfs devtmpfs $R/dev
$B mkdir -p $R/dev/shm $R/dev/pts
$B mount -t tmpfs tmpfs $R/dev/shm
$B mount -t devpts devpts $R/dev/pts
$B mount -t tmpfs tmpfs $R/run
$B ln -sf /proc/self/fd $R/dev/fd
$B ln -sf /proc/self/fd/0 $R/dev/stdin
$B ln -sf /proc/self/fd/1 $R/dev/stdout
$B ln -sf /proc/self/fd/2 $R/dev/stderr

# Without a cache each write goes to the host at once: that is what makes output stream, and keeps
# it when the guest is ended from outside.
$B mkdir -p $R/run/control
$B mount -t 9p -o trans=virtio,version=9p2000.L,msize=1048576,cache=none control $R/run/control
$B chroot $R /bin/bash /run/control/run.sh
echo "init: run.sh ended with status $?"
$B poweroff -f
