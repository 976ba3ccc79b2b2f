# The two-host rig: four soft-RoCE devices in one guest that reach each other over the wire.
#
#   host 0 (target)      rxe_a0 on a0 192.168.77.1    rxe_b0 on b0 192.168.77.3
#   host 1 (initiator)   rxe_a1 on a1 192.168.77.2    rxe_b1 on b1 192.168.77.4
#
# rdma_rxe works in the first network namespace only, so both hosts are in it. The kernel would
# deliver a packet for an address of its own over `lo`, never reaching the devices: policy rules send
# it out of the sender's NIC instead, over a bridge, and let it in at the receiver's.
# A NIC that goes down loses its route: `ip route replace 192.168.77.0/24 dev NIC table 10N` brings
# it back (table 101 for a0, 102 for a1, 103 for b0, 104 for b1).
# MTU 4200 holds an RDMA path MTU of 4096 and its headers.

# RoCE expects a fabric that does not drop. The kernel's queue between two veths drops at 1 000
# packets, which a few megabytes in flight exceed; scenarios that want loss make it with netem.
echo 100000 > /proc/sys/net/core/netdev_max_backlog

conf=/proc/sys/net/ipv4/conf
echo 1 > $conf/all/accept_local
echo 0 > $conf/all/rp_filter
echo 1 > $conf/all/arp_ignore
echo 2 > $conf/all/arp_announce

ip link add br0 type bridge
ip link set br0 mtu 4200 up
host=1
for nic in a0 a1 b0 b1; do
    ip link add $nic type veth peer name p$nic
    ip link set p$nic mtu 4200 master br0 up
    ip addr add 192.168.77.$host/24 dev $nic noprefixroute
    ip link set $nic mtu 4200 up
    echo 1 > $conf/$nic/accept_local
    echo 0 > $conf/$nic/rp_filter
    echo 1 > $conf/$nic/arp_ignore
    echo 2 > $conf/$nic/arp_announce
    # Without it, deleting an address would delete the later ones of its subnet too.
    echo 1 > $conf/$nic/promote_secondaries
    ip rule add pref 10 iif $nic lookup local
    ip rule add pref 15 oif $nic lookup 10$host
    ip rule add pref 20 from 192.168.77.$host to 192.168.77.0/24 lookup 10$host
    ip route add 192.168.77.0/24 dev $nic table 10$host
    host=$((host + 1))
done
ip rule add pref 100 lookup local
ip rule del pref 0
for nic in a0 a1 b0 b1; do
    rdma link add rxe_$nic type rxe netdev $nic
done

# A device is usable when its port is active and its IPv4 GID is in the table.
ready() {
    port=/sys/class/infiniband/rxe_$1/ports/1
    grep -q ACTIVE $port/state && cat $port/gids/* 2> /dev/null | grep -q "ffff:c0a8:4d"
}
for nic in a0 a1 b0 b1; do
    tries=0
    until ready $nic; do
        tries=$((tries + 1))
        if [ $tries -gt 300 ]; then
            echo "rig.sh: rxe_$nic has no active port with an IPv4 GID after 30 s"
            exit 1
        fi
        sleep 0.1
    done
done
