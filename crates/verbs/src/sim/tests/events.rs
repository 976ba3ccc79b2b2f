//! Asynchronous events: whose they are, how they go wrong, and that each is acknowledged.

use super::support::{Connected, Host, MS, address, options};
use crate::sim::{EventOptions, EventVerdict, Fabric, FabricOptions, NicOptions, PortOptions};
use crate::{AsyncEventKind as Kind, EventSubject, RemoteAddress, WorkRequest};

#[test]
fn every_context_has_a_queue_of_its_own() {
    let fabric = Fabric::new(options());
    let one = Host::new(&fabric, 1);
    let other = Host::on(&fabric, one.process, one.nic);
    fabric.port_down(one.port());
    assert_eq!(one.events(), [Kind::PortErr]);
    assert_eq!(other.events(), [Kind::PortErr]);
    assert_eq!(one.events(), []);
}

#[test]
fn an_event_names_its_port_or_object() {
    let two = Connected::new(options());
    let _ = (two.a.events(), two.b.events());
    two.fabric.port_down(two.a.port());
    let event = two
        .a
        .context
        .next_event()
        .expect("works")
        .expect("an event");
    assert_eq!(event.subject, EventSubject::Port(1));
    assert!(two.fabric.break_queue_pair(two.b.nic, two.pair_b.qp_num()));
    let event = two
        .b
        .context
        .next_event()
        .expect("works")
        .expect("an event");
    assert_eq!(event.kind, Kind::QpFatal);
    assert_eq!(
        event.subject,
        EventSubject::QueuePair(Some(two.pair_b.id()))
    );
    assert!(!two.fabric.break_queue_pair(two.b.nic, 4_711));
    for kind in [Kind::SmChange, Kind::ClientReregister, Kind::Other(77)] {
        two.fabric.raise_event(two.b.nic, kind, Some(1));
    }
    assert_eq!(
        two.b.events(),
        [Kind::SmChange, Kind::ClientReregister, Kind::Other(77)]
    );
}

#[test]
fn the_first_packet_in_rtr_raises_comm_est() {
    let fabric = Fabric::new(options());
    let (a, b) = (Host::new(&fabric, 1), Host::new(&fabric, 2));
    let (pair_a, pair_b) = (a.pair(), b.pair());
    super::support::connect(&a, &pair_a, &b, pair_b.qp_num(), 6).expect("connected");
    pair_b.to_init(&super::support::init()).expect("INIT");
    let attr = super::support::rtr(&b, &a, pair_a.qp_num());
    pair_b.to_rtr(&attr).expect("RTR");
    let write = WorkRequest::write(1, a.local(0, 8), b.remote(0));
    pair_a.post(&[write, write]).expect("posted");
    fabric.advance(MS);
    assert_eq!(b.events(), [Kind::CommEst]);
}

#[test]
fn cards_tell_the_responder_of_a_refused_access() {
    for (options, expected) in [
        (options(), vec![]),
        (FabricOptions::card(7), vec![Kind::QpAccessErr]),
    ] {
        let two = Connected::new(options);
        let _ = two.b.events();
        let nowhere = RemoteAddress { addr: 0, rkey: 0 };
        two.post(&[WorkRequest::write(1, two.a.local(0, 8), nowhere)]);
        two.fabric.advance(100 * MS);
        assert_eq!(two.b.events(), expected);
    }
}

#[test]
fn events_can_be_dropped_doubled_delayed_and_reordered() {
    let fabric = Fabric::new(options());
    let host = Host::new(&fabric, 1);
    fabric.drop_events(host.nic, 2);
    fabric.port_down(host.port());
    fabric.port_up(host.port());
    assert_eq!(
        host.events(),
        [Kind::PortActive],
        "PORT_ERR and one PORT_ACTIVE are lost"
    );

    let guard = fabric.on_event(|event| match event.kind {
        Kind::PortErr => EventVerdict::Duplicate,
        Kind::GidChange => EventVerdict::Drop,
        Kind::PortActive => EventVerdict::Delay(30 * MS),
        _ => EventVerdict::Pass,
    });
    fabric.port_down(host.port());
    fabric.add_address(host.port(), address(9));
    fabric.port_up(host.port());
    assert_eq!(host.events(), [Kind::PortErr; 2]);
    fabric.advance(30 * MS);
    assert_eq!(host.events(), [Kind::PortActive; 2]);
    guard.undo();

    let everything = EventOptions {
        loss: 1.0,
        ..EventOptions::faultless()
    };
    let guard = fabric.disturb_events(everything);
    fabric.port_down(host.port());
    assert_eq!(host.events(), []);
    drop(guard);
    fabric.port_up(host.port());
    assert_eq!(host.events().len(), 2);
}

#[test]
fn delays_reorder_kinds_but_never_one_kind() {
    let mut reordered = false;
    for seed in 0..20 {
        let fabric = Fabric::new(FabricOptions {
            seed,
            events: EventOptions {
                delay_max: 50 * MS,
                reorder_kinds: true,
                ..EventOptions::faultless()
            },
            ..options()
        });
        let host = Host::new(&fabric, 1);
        let mut expected = Vec::new();
        for _ in 0..5 {
            fabric.port_down(host.port());
            fabric.port_up(host.port());
            expected.extend([Kind::PortErr, Kind::PortActive]);
        }
        fabric.advance(50 * MS);
        let found = host.events();
        assert_eq!(found.len(), expected.len());
        reordered |= found != expected;
    }
    assert!(reordered, "no seed reordered anything");

    let fabric = Fabric::new(FabricOptions {
        events: EventOptions {
            delay_max: 50 * MS,
            ..EventOptions::faultless()
        },
        ..options()
    });
    let host = Host::new(&fabric, 1);
    let mut expected = Vec::new();
    for _ in 0..20 {
        fabric.port_down(host.port());
        fabric.port_up(host.port());
        expected.extend([Kind::PortErr, Kind::PortActive]);
    }
    fabric.advance(50 * MS);
    assert_eq!(host.events(), expected, "late, and in order");
}

#[test]
fn however_late_events_of_one_kind_come_in_order() {
    let mut crossed = false;
    for seed in 0..20 {
        let fabric = Fabric::new(FabricOptions {
            seed,
            events: EventOptions {
                delay_max: 50 * MS,
                reorder_kinds: true,
                ..EventOptions::faultless()
            },
            ..options()
        });
        let mut nic = NicOptions::ethernet("two_ports", address(1));
        nic.ports.push(PortOptions::ethernet("second", &[]));
        let host = Host::with_nic(&fabric, &nic);
        for port in [1, 2] {
            fabric.port_down(host.nic.port(port));
            fabric.port_up(host.nic.port(port));
        }
        fabric.advance(50 * MS);
        let mut found = Vec::new();
        while let Some(event) = host.context.next_event().expect("works") {
            found.push((event.kind, event.subject));
        }
        for kind in [Kind::PortErr, Kind::PortActive] {
            let of_kind = found.iter().filter(|(found, _)| *found == kind);
            let ports: Vec<_> = of_kind.map(|(_, subject)| *subject).collect();
            assert_eq!(
                ports,
                [EventSubject::Port(1), EventSubject::Port(2)],
                "seed {seed}"
            );
        }
        crossed |= found[0].0 != Kind::PortErr || found[1].0 != Kind::PortActive;
    }
    assert!(crossed, "no seed reordered kinds");
}

#[test]
fn a_queue_of_events_is_bounded() {
    let fabric = Fabric::new(FabricOptions {
        events: EventOptions {
            queue_max: 10,
            ..EventOptions::faultless()
        },
        ..options()
    });
    let host = Host::new(&fabric, 1);
    for _ in 0..100 {
        fabric.port_down(host.port());
        fabric.port_up(host.port());
    }
    assert_eq!(host.events().len(), 10);
}

#[test]
fn an_event_about_a_destroyed_object_is_never_seen() {
    let two = Connected::new(FabricOptions {
        events: EventOptions {
            delay_max: 10 * MS,
            ..EventOptions::faultless()
        },
        comm_est_events: false,
        ..options()
    });
    // One waits in the queue, and one is still on its way.
    two.fabric.break_queue_pair(two.a.nic, two.pair_a.qp_num());
    two.fabric.advance(10 * MS);
    two.fabric.break_queue_pair(two.a.nic, two.pair_a.qp_num());
    let Connected {
        fabric, a, pair_a, ..
    } = two;
    drop(pair_a);
    fabric.advance(10 * MS);
    let successor = a.pair();
    assert_eq!(
        a.events(),
        [],
        "above all it is not about {}",
        successor.id()
    );
}

#[test]
fn destroying_an_object_with_an_unacknowledged_event_panics() {
    use std::panic::{AssertUnwindSafe, catch_unwind};
    let two = Connected::new(options());
    let context = two
        .fabric
        .with(|core| core.contexts.handles(|c| c.nic == two.a.nic)[0]);
    let pair = two
        .fabric
        .with(|core| core.pairs.handles(|p| p.nic == two.a.nic)[0]);
    two.fabric.break_queue_pair(two.a.nic, two.pair_a.qp_num());
    let taken = two
        .fabric
        .with(|core| core.take_event(context))
        .expect("the channel works")
        .expect("an event");
    let destroy = || two.fabric.with(|core| core.destroy_pair(pair));
    let complaint = catch_unwind(AssertUnwindSafe(destroy)).expect_err("it would hang");
    let text = complaint.downcast_ref::<String>().expect("words");
    assert!(text.contains("not acknowledged"), "{text}");
    assert!(text.contains("QP_FATAL"), "{text}");
    two.fabric.with(|core| core.acknowledge(context, taken));
    two.fabric.with(|core| core.destroy_pair(pair));
    assert_eq!(two.fabric.stats().queue_pairs, 1);
}

#[test]
fn the_public_api_acknowledges_by_itself() {
    let two = Connected::new(options());
    two.fabric.break_queue_pair(two.a.nic, two.pair_a.qp_num());
    let event = two
        .a
        .context
        .next_event()
        .expect("works")
        .expect("an event");
    // The event is still held, and the pair can go.
    let Connected { fabric, pair_a, .. } = two;
    drop(pair_a);
    assert_eq!(event.kind, Kind::QpFatal);
    assert_eq!(fabric.stats().queue_pairs, 1);
}
