//! What a time or a rate is promised for, measured where both are exact: the nodes of the storm, in
//! its virtual time, with one fault and work all the while.

use std::collections::BTreeMap;
use std::time::Duration;

use rand::SeedableRng as _;
use rand::rngs::SmallRng;
use rerail_verbs::sim::{FabricOptions, FaultGuard, LinkOptions, NicId, WorkVerdict};

use super::ledger::TransferId;
use super::node::nic_name;
use super::world::World;
use crate::machine::Time;

/// How often there is a look at what has finished, and new work.
const STEP: Duration = Duration::from_millis(2);
/// Transfers at a time.
const AT_ONCE: usize = 16;
/// Bits per second of each link: so few that a minute of it is cheap, and always the bottleneck.
const SLOW_BITS_PER_S: u64 = 16_000_000;
/// The same for some seconds.
const FAST_BITS_PER_S: u64 = 100_000_000;
/// Time limit of a transfer; none may come near it.
const DEADLINE: Duration = Duration::from_secs(20);

/// An initiator, a target, two NICs each, and writes all the time.
struct Pair {
    world: World,
    rng: SmallRng,
    /// When each that runs was asked for.
    asked: BTreeMap<TransferId, Time>,
    /// The longest time that one took.
    longest: Duration,
    _links: Vec<FaultGuard>,
}

impl Pair {
    fn new(seed: u64, bits_per_s: u64) -> Self {
        super::coverage::keep_notes();
        let rng = SmallRng::seed_from_u64(seed);
        let mut world = World::of(seed, rng.clone(), FabricOptions::card(seed), 2, 2);
        world.ledger.unwatched = true;
        world.heal();
        let link = LinkOptions {
            bits_per_s,
            ..LinkOptions::default()
        };
        let all = world.hosts.iter().flat_map(|host| &host.nics);
        let links = all.map(|nic| world.fabric.degrade(nic.port(1), link.clone()));
        let links = links.collect();
        let mut pair = Self {
            world,
            rng,
            asked: BTreeMap::new(),
            longest: Duration::ZERO,
            _links: links,
        };
        // Rates are learnt.
        pair.work(Duration::from_secs(5));
        pair.longest = Duration::ZERO;
        pair
    }

    fn nic(&self, nic: usize) -> NicId {
        self.world.hosts[0].nics[nic]
    }

    /// Keeps the initiator busy for so long.
    fn work(&mut self, span: Duration) {
        let until = self.world.now + span;
        while self.world.now < until {
            while self.world.ledger.open() < AT_ONCE {
                let asked = self.world.submit_one(0, 1, false, DEADLINE, &mut self.rng);
                assert!(asked, "there is memory, and a peer");
            }
            self.look();
            self.world.run(STEP);
            self.look();
        }
    }

    fn look(&mut self) {
        let now = self.world.now;
        let node = self.world.node(0).expect("it runs");
        for id in node.jobs.keys() {
            self.asked.entry(*id).or_insert(now);
        }
        let longest = &mut self.longest;
        self.asked.retain(|id, asked| {
            *longest = (*longest).max(now.saturating_since(*asked));
            node.jobs.contains_key(id)
        });
    }

    /// Bytes that the initiator's NIC has moved.
    fn bytes(&mut self, nic: usize) -> u64 {
        let node = self.world.node(0).expect("it runs");
        let peers = node.known.values();
        let rails = peers.flat_map(|known| known.peer.rails().iter().cloned().collect::<Vec<_>>());
        let own = rails.filter(|rail| rail.local_name().contains(&nic_name(nic as u32)));
        own.map(|rail| rail.stats().bytes).sum()
    }

    /// Bytes that the initiator's NIC moves in so long, with all the work that it can take.
    fn moved(&mut self, nic: usize, span: Duration) -> u64 {
        let before = self.bytes(nic);
        self.work(span);
        self.bytes(nic) - before
    }

    fn none_failed(&self) {
        assert_eq!(self.world.ledger.failed_since_healed, 0);
    }
}

#[test]
fn a_control_verb_that_hangs_for_a_minute_leaves_the_other_nic_its_full_rate() {
    let mut pair = Pair::new(1, SLOW_BITS_PER_S);
    let minute = Duration::from_secs(60);
    let port = pair.nic(0).port(1);
    // What the other NIC moves alone, with nothing amiss.
    pair.world.fabric.port_down(port);
    pair.work(Duration::from_secs(2));
    let alone = 4 * pair.moved(1, minute / 4);
    pair.world.fabric.port_up(port);
    pair.work(Duration::from_secs(5));
    assert!(pair.moved(0, Duration::from_secs(1)) > 0, "it is back");
    pair.world.fabric.hang_control(pair.nic(0), minute);
    // Makes the control thread do something, which hangs.
    pair.world.fabric.port_down(port);
    let beside = pair.moved(1, minute);
    println!("alone {alone} bytes, beside {beside}");
    assert!(
        beside * 100 >= alone * 98,
        "{beside} bytes in a minute beside a NIC that hangs, {alone} alone"
    );
    pair.none_failed();
}

#[test]
fn a_rail_on_which_nothing_completes_and_no_event_comes_costs_no_transfer_a_stall() {
    for seed in 0..6 {
        let mut pair = Pair::new(seed, FAST_BITS_PER_S);
        let id = pair.nic(seed as usize % 2);
        // Each time in another state of the work.
        pair.work(Duration::from_millis(37 * seed));
        let fault = if seed % 3 == 2 {
            // Neither end hears the other.
            let far = &pair.world.hosts[1].nics;
            let far: Vec<_> = far.iter().map(|nic| nic.port(1)).collect();
            pair.world.fabric.partition(&[id.port(1)], &far)
        } else {
            // Not even what is flushed comes back.
            pair.world.fabric.on_work(move |work| {
                if work.nic == id {
                    WorkVerdict::LoseCompletion
                } else {
                    WorkVerdict::Pass
                }
            })
        };
        pair.work(Duration::from_secs(3));
        println!("seed {seed}: the longest transfer took {:?}", pair.longest);
        assert!(
            pair.longest < Duration::from_millis(1_500),
            "a transfer took {:?} (seed {seed})",
            pair.longest
        );
        fault.undo();
        pair.none_failed();
    }
}
