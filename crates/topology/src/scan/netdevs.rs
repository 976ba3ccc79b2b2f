//! Network interfaces: kind and state from `sys/class/net`, addresses from `proc/net`.

use std::collections::BTreeMap;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use super::root::Root;
use crate::{NetdevFacts, NetdevKind, Subnet};

const CLASS: &str = "sys/class/net";
/// `ARPHRD_ETHER` and `ARPHRD_INFINIBAND`: interfaces with a card or its like behind them.
const PLAIN_TYPES: &[&str] = &["1", "32"];
/// `ARPHRD_TUNNEL`, `ARPHRD_TUNNEL6`, `ARPHRD_SIT`, `ARPHRD_IPGRE`, `ARPHRD_IP6GRE`.
const TUNNEL_TYPES: &[&str] = &["768", "769", "776", "778", "823"];

pub(super) fn scan(root: &Root) -> Vec<NetdevFacts> {
    scan_some(root, |_| true)
}

/// The facts of the interfaces that are wanted, going by index and name.
pub(super) fn scan_some(root: &Root, wanted: impl Fn(&NetdevFacts) -> bool) -> Vec<NetdevFacts> {
    let names = root.list(CLASS).unwrap_or_default();
    let mut addresses = addresses(root, &names);
    let facts = names.into_iter().map(|name| NetdevFacts {
        index: root
            .read(format!("{CLASS}/{name}/ifindex"))
            .ok()
            .and_then(|text| text.parse().ok())
            .unwrap_or(0),
        ..NetdevFacts::named(name)
    });
    let complete = |facts: NetdevFacts| NetdevFacts {
        kind: kind(root, &facts.name),
        up: is_up(root, &facts.name),
        addresses: addresses.as_mut().and_then(|all| all.remove(&facts.name)),
        ..facts
    };
    facts.filter(wanted).map(complete).collect()
}

fn kind(root: &Root, name: &str) -> NetdevKind {
    let base = format!("{CLASS}/{name}");
    let uevent = root.read(format!("{base}/uevent")).unwrap_or_default();
    let device_type = uevent
        .lines()
        .find_map(|line| line.strip_prefix("DEVTYPE="));
    if let Some(word) = device_type {
        return NetdevKind::from_kernel(word.trim());
    }
    for (directory, kind) in [
        ("bonding", NetdevKind::Bond),
        ("bridge", NetdevKind::Bridge),
    ] {
        if root.resolve(format!("{base}/{directory}")).is_some() {
            return kind;
        }
    }
    let hardware = root.read(format!("{base}/type")).unwrap_or_default();
    let has_card = root.resolve(format!("{base}/device")).is_some();
    match &*hardware {
        kind if TUNNEL_TYPES.contains(&kind) => NetdevKind::Tunnel,
        kind if PLAIN_TYPES.contains(&kind) && has_card => NetdevKind::Plain,
        _ => NetdevKind::Unknown,
    }
}

/// `unknown` is what interfaces without a carrier of their own say; that is not "down".
fn is_up(root: &Root, name: &str) -> Option<bool> {
    match root
        .read(format!("{CLASS}/{name}/operstate"))
        .ok()?
        .as_str()
    {
        "up" => Some(true),
        "down" | "lowerlayerdown" | "notpresent" => Some(false),
        _ => None,
    }
}

/// The addresses of each interface; `None` where they cannot be read.
///
/// `proc/net/fib_trie` lists this machine's IPv4 addresses without their interfaces. The routes of
/// directly connected networks tell those; an address that no such route covers could be anybody's
/// and so counts as everybody's, so that no row is called dead by mistake.
fn addresses(root: &Root, names: &[String]) -> Option<BTreeMap<String, Vec<Subnet>>> {
    let read = |below: &str| std::fs::read_to_string(root.join(below)).ok();
    let trie = read("proc/net/fib_trie")?;
    let routes = read("proc/net/route")?;
    let mut all: BTreeMap<String, Vec<Subnet>> = names
        .iter()
        .map(|name| (name.clone(), Vec::new()))
        .collect();
    // Without IPv6 in the kernel the file does not exist.
    for (name, subnet) in parse_if_inet6(&read("proc/net/if_inet6").unwrap_or_default()) {
        all.entry(name).or_default().push(subnet);
    }
    let routes = parse_routes(&routes);
    for address in parse_fib_trie(&trie) {
        let connected = routes
            .iter()
            .filter(|(_, subnet)| subnet.contains(address.into()));
        let connected: Vec<_> = connected.collect();
        for (name, own) in &mut all {
            let of_name = connected.iter().find(|(device, _)| device == name);
            let bits = match of_name {
                Some((_, subnet)) => subnet.prefix_bits(),
                None if connected.is_empty() => 32,
                None => continue,
            };
            own.extend(Subnet::new(address.into(), bits));
        }
    }
    Some(all)
}

/// `address index prefix-length scope flags name`, numbers in hex.
fn parse_if_inet6(text: &str) -> Vec<(String, Subnet)> {
    let parse = |line: &str| {
        let mut fields = line.split_whitespace();
        let address = u128::from_str_radix(fields.next()?, 16).ok()?;
        let bits = u8::from_str_radix(fields.nth(1)?, 16).ok()?;
        let name = fields.nth(2)?;
        let address = IpAddr::from(Ipv6Addr::from_bits(address));
        Some((name.to_owned(), Subnet::new(address, bits)?))
    };
    text.lines().filter_map(parse).collect()
}

/// Directly connected networks: those without a gateway and with a prefix.
fn parse_routes(text: &str) -> Vec<(String, Subnet)> {
    // The kernel prints the big-endian words of addresses as numbers of this machine.
    let word = |text: &str| {
        Some(Ipv4Addr::from(
            u32::from_str_radix(text, 16).ok()?.to_ne_bytes(),
        ))
    };
    let parse = |line: &str| {
        let fields: Vec<_> = line.split_whitespace().collect();
        let destination = word(fields.get(1)?)?;
        let gateway = word(fields.get(2)?)?;
        let mask = word(fields.get(7)?)?.to_bits();
        let bits = u8::try_from(mask.leading_ones()).ok()?;
        if !gateway.is_unspecified() || bits == 0 {
            return None;
        }
        let subnet = Subnet::new(destination.into(), bits)?;
        Some(((*fields.first()?).to_owned(), subnet))
    };
    text.lines().skip(1).filter_map(parse).collect()
}

/// Addresses that are followed by `/32 host LOCAL`.
fn parse_fib_trie(text: &str) -> Vec<Ipv4Addr> {
    let mut found = Vec::new();
    let mut last = None;
    for line in text.lines() {
        let line = line.trim();
        if let Some(address) = line.strip_prefix("|-- ") {
            last = address.parse::<Ipv4Addr>().ok();
        } else if line.starts_with("/32 host LOCAL") {
            found.extend(last.filter(|address| !address.is_loopback()));
        }
    }
    found.sort_unstable();
    found.dedup();
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    const ROUTES: &str = "Iface\tDestination\tGateway\tFlags\tRefCnt\tUse\tMetric\tMask\tMTU\n\
        eth0\t00000000\t0100000A\t0003\t0\t0\t0\t00000000\t0\t0\t0\n\
        eth0\t0000000A\t00000000\t0001\t0\t0\t0\t0000FFFF\t0\t0\t0\n";
    const TRIE: &str = "Main:\n  +-- 0.0.0.0/0 3 0 5\n     |-- 10.0.0.0\n        /16 link UNICAST\n\
        Local:\n     |-- 10.0.3.4\n        /32 host LOCAL\n     |-- 10.0.255.255\n        \
        /32 link BROADCAST\n     |-- 127.0.0.1\n        /32 host LOCAL\n";

    #[test]
    fn addresses_are_read_as_the_kernel_writes_them() {
        let inet6 = "fe80000000000000020011fffe220001 02 40 20 80     eth0\nbroken\n";
        let (name, subnet) = parse_if_inet6(inet6).remove(0);
        assert_eq!((name.as_str(), subnet.prefix_bits()), ("eth0", 64));
        assert_eq!(parse_fib_trie(TRIE), [Ipv4Addr::new(10, 0, 3, 4)]);
        #[cfg(target_endian = "little")]
        assert_eq!(
            parse_routes(ROUTES),
            [("eth0".into(), "10.0.0.0/16".parse().expect("a subnet"))]
        );
    }

    proptest::proptest! {
        #[test]
        fn any_text_is_survived(text: String, lines in "([0-9a-f]{0,34}[ \t|/-]{0,3}){0,20}") {
            for text in [&text, &lines] {
                let _ = (parse_if_inet6(text), parse_fib_trie(text), parse_routes(text));
            }
        }
    }
}
