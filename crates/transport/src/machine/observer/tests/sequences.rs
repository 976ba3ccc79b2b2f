//! Sequences from the field, `tests/cases/gid-event-sequences.json`.

use rerail_verbs::ObjectId;
use serde_json::Value;

use super::*;

/// The steps of a sequence: the table (if the step has one) and the number of events it stands for.
fn sequence(id: &str) -> (LinkLayer, Vec<Option<Vec<GidEntry>>>) {
    let text = include_str!("../../../../tests/cases/gid-event-sequences.json");
    let all: Value = serde_json::from_str(text).expect("the fixture is JSON");
    let case = all
        .as_array()
        .and_then(|cases| cases.iter().find(|case| case["id"] == id))
        .expect("the sequence is in the fixture");
    let link_layer = match case["link_layer"].as_str() {
        Some("InfiniBand") => LinkLayer::InfiniBand,
        _ => LinkLayer::Ethernet,
    };
    let steps = case["steps"].as_array().expect("steps");
    let tables = steps
        .iter()
        .map(|step| step["table"].as_array().map(|rows| table(rows)));
    (link_layer, tables.collect())
}

fn table(rows: &[Value]) -> Vec<GidEntry> {
    let entry = |row: &Value| GidEntry {
        index: row["index"].as_u64().expect("an index") as u32,
        gid: row["gid"]
            .as_str()
            .and_then(|text| text.parse().ok())
            .expect("a GID"),
        gid_type: match row["type"].as_str() {
            Some("RoCE v2") => GidType::RoceV2,
            _ => GidType::RoceV1,
        },
        netdev: row["ndev"].as_str().map(|name| Netdev {
            index: 0,
            name: name.into(),
        }),
    };
    rows.iter().map(entry).collect()
}

fn published(actions: &[Action]) -> Vec<&PortFacts> {
    let facts = actions.iter().filter_map(|action| match action {
        Action::Publish { facts, .. } => Some(facts),
        _ => None,
    });
    facts.collect()
}

#[test]
fn e08_link_local_first_then_the_address_at_another_index() {
    let (_, tables) = sequence("E08");
    let tables: Vec<_> = tables.into_iter().map(Option::unwrap_or_default).collect();
    let mut rig = Rig::new(&[1]);
    rig.set_rows(1, &tables[0]);
    rig.advance(Duration::from_secs(10));
    assert_eq!(rig.gid(1).map(|(index, _)| index), Some(3));
    let address = rig.gid(1).map(|(_, gid)| gid);
    rig.take();

    // 10 s: the port goes down, its GIDs with it. Published as down, with the last GID.
    rig.set_rows(1, &tables[1]);
    rig.set_state(1, PortState::Down);
    rig.event(AsyncEventKind::PortErr, 1);
    let actions = rig.take();
    assert!(matches!(published(&actions)[..], [facts] if !facts.up && facts.gid.is_some()));

    // 40 s: link-local only, the port is not active yet.
    rig.advance(Duration::from_secs(30));
    rig.set_rows(1, &tables[2]);
    rig.event(AsyncEventKind::GidChange, 1);
    assert!(published(&rig.take()).is_empty());

    // 41 s: active, and still link-local only: held back.
    rig.advance(Duration::from_secs(1));
    rig.set_state(1, PortState::Active);
    rig.set_rows(1, &tables[3]);
    rig.event(AsyncEventKind::PortActive, 1);
    rig.advance(Duration::from_millis(1_500));
    let actions = rig.take();
    assert!(published(&actions).is_empty());
    assert!(!rig.observer.gate_open(1));

    // 42.5 s: the address is back at index 6. Published since the port's state changed.
    rig.set_rows(1, &tables[4]);
    rig.event(AsyncEventKind::GidChange, 1);
    let actions = rig.take();
    assert!(matches!(published(&actions)[..], [facts] if facts.up));
    assert_eq!(rig.gid(1), address.map(|gid| (6, gid)));
    assert!(rig.observer.gate_open(1));
    assert!(actions.iter().any(|action| matches!(
        action,
        Action::Report { outcome: Outcome::Changed(changes), .. } if *changes == Changes::STATE
    )));
}

#[test]
fn e12_a_storm_of_gid_changes_with_nothing_changed_drops_and_publishes_nothing() {
    let (_, tables) = sequence("E12");
    let tables: Vec<_> = tables.into_iter().map(Option::unwrap_or_default).collect();
    let mut rig = Rig::new(&[1]);
    rig.set_rows(1, &tables[0]);
    rig.advance(Duration::from_secs(10));
    rig.take();
    for _ in 0..40 {
        rig.event(AsyncEventKind::GidChange, 1);
        rig.advance(Duration::from_millis(75));
    }
    assert!(
        rig.words()
            .iter()
            .all(|word| ["read", "unchanged"].contains(word))
    );

    rig.set_rows(1, &tables[2]);
    rig.event(AsyncEventKind::GidChange, 1);
    rig.advance(Duration::from_secs(30));
    assert!(
        rig.words()
            .iter()
            .all(|word| ["read", "unchanged"].contains(word))
    );
    assert_eq!(rig.gid(1).map(|(index, _)| index), Some(3));
}

#[test]
fn e14_the_flaps_of_the_field_end_where_they_should() {
    let (link_layer, _) = sequence("E14");
    let mut rig = Rig::new(&[1]);
    rig.set(1, |reading| {
        reading.attr.link_layer = link_layer;
        reading.attr.lid = 17;
        reading.gids = vec![GidEntry {
            index: 0,
            gid: "fe80::f452:1403:7b:cba1".parse().expect("literal"),
            gid_type: GidType::InfiniBand,
            netdev: None,
        }];
    });
    rig.advance(Duration::from_secs(10));
    rig.take();
    rig.set_state(1, PortState::Down);
    rig.event(AsyncEventKind::PortErr, 1);
    assert!(matches!(published(&rig.take())[..], [facts] if !facts.up));
    rig.advance(Duration::from_secs(8));
    rig.set_state(1, PortState::Active);
    rig.event(AsyncEventKind::PortActive, 1);
    let actions = rig.take();
    assert!(matches!(published(&actions)[..], [facts] if facts.up));
    assert_eq!(
        actions.last(),
        Some(&Action::HalfOpen {
            port: 1,
            endpoints_kept: false
        }),
        "eligible only after a proof"
    );
    rig.advance(Duration::from_secs(423));
    rig.take();
    rig.set_state(1, PortState::Down);
    rig.event(AsyncEventKind::PortErr, 1);
    assert!(matches!(published(&rig.take())[..], [facts] if !facts.up));
    assert!(!rig.observer.gate_open(1));
    let stale = EventSubject::QueuePair(Some(ObjectId {
        index: 0,
        generation: 0,
    }));
    rig.subject_event(AsyncEventKind::QpFatal, stale);
    assert_eq!(rig.words(), ["endpoint"]);
}
