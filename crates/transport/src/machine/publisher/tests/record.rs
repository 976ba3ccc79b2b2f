//! How the record is rendered.

use super::*;
use rerail_metadata::descriptor::{DeviceState, JsonForm};

fn names(descriptor: &SegmentDescriptor) -> Vec<&str> {
    descriptor
        .devices
        .iter()
        .map(|device| device.name.as_str())
        .collect()
}

fn rendered(record: &LocalRecord) -> SegmentDescriptor {
    record.render(instance(1), 1)
}

fn apply(record: &mut LocalRecord, input: Input) {
    let Input::Edit(edit) = input else {
        panic!("an edit is expected");
    };
    record.apply(edit).expect("the edit can be made");
}

#[test]
fn e01_a_nic_that_is_down_leaves_the_matrix_and_keeps_its_place_and_gid() {
    let mut record = local_record(&["mlx5_0", "mlx5_1", "mlx5_2"], PublishOrder::Fixed);
    for local in 0..3 {
        apply(&mut record, port(local, true, "10.0.0.1"));
    }
    apply(&mut record, register(7, 3));
    apply(&mut record, port(1, false, "10.0.0.1"));
    let descriptor = rendered(&record);
    assert_eq!(names(&descriptor), ["mlx5_0", "mlx5_1", "mlx5_2"]);
    assert_eq!(descriptor.buffers[0].rkey, [7, 1_000_007, 2_000_007]);
    assert_eq!(descriptor.priority_matrix["cpu:0"].available, ["mlx5_2"]);
    assert_eq!(
        descriptor.devices[1].gid,
        gid("10.0.0.1"),
        "readers refuse an empty GID"
    );
    let member = descriptor.rerail.expect("ours");
    assert_eq!(member.devices[1].state, DeviceState::Down);
    assert_eq!(member.devices[0].state, DeviceState::Up);
}

#[test]
fn healthy_first_moves_withdrawn_nics_to_the_tail_of_all_three_arrays() {
    let mut record = local_record(&["a", "b", "c"], PublishOrder::HealthyFirst);
    for local in 0..3 {
        apply(&mut record, port(local, true, "10.0.0.1"));
    }
    apply(&mut record, register(7, 3));
    apply(&mut record, port(0, false, "10.0.0.1"));
    let descriptor = rendered(&record);
    assert_eq!(names(&descriptor), ["b", "c", "a"]);
    assert_eq!(descriptor.buffers[0].rkey, [1_000_007, 2_000_007, 7]);
    assert_eq!(descriptor.buffers[0].lkey, [1_007, 2_007, 7]);
    let member = descriptor.rerail.as_ref().expect("ours");
    assert_eq!(member.devices[2].name, "a");
    assert!(descriptor.validate().is_ok());
    apply(&mut record, port(0, true, "10.0.0.1"));
    assert_eq!(names(&rendered(&record)), ["a", "b", "c"]);
}

#[test]
fn a_nic_that_comes_back_is_recovering_until_it_is_proved() {
    let mut record = local_record(&["a"], PublishOrder::Fixed);
    let state = |record: &LocalRecord| {
        rendered(record).rerail.expect("ours").devices[0]
            .state
            .clone()
    };
    assert_eq!(state(&record), DeviceState::Down, "nothing is known of it");
    apply(&mut record, port(0, true, "10.0.0.1"));
    assert_eq!(state(&record), DeviceState::Up);
    apply(&mut record, port(0, false, "10.0.0.1"));
    apply(&mut record, port(0, true, "10.0.0.2"));
    assert_eq!(state(&record), DeviceState::Recovering);
    assert!(
        rendered(&record).priority_matrix["cpu:0"]
            .preferred
            .contains(&"a".to_owned())
    );
    let proved = Edit::Proved { local: LocalNic(0) };
    assert_eq!(record.apply(proved.clone()), Ok(true));
    assert_eq!(record.apply(proved), Ok(false));
    assert_eq!(state(&record), DeviceState::Up);
}

#[test]
fn memory_that_is_registered_while_a_nic_is_taken_in_is_published_with_the_others() {
    let mut record = local_record(&["a", "b"], PublishOrder::Fixed);
    // It has a key on the third already.
    apply(&mut record, register(1, 3));
    let mut expected = local_record(&["a", "b"], PublishOrder::Fixed);
    apply(&mut expected, register(1, 2));
    assert_eq!(rendered(&record), rendered(&expected));
}

#[test]
fn edits_that_cannot_be_made_change_nothing() {
    let mut record = local_record(&["a", "b"], PublishOrder::Fixed);
    apply(&mut record, register(1, 2));
    let before = rendered(&record);
    let skipped = Edit::Nic {
        local: LocalNic(3),
        name: "d".into(),
    };
    let refused = EditError::Order { local: 3, nics: 2 };
    assert_eq!(record.apply(skipped), Err(refused));
    let Input::Edit(twice) = register(1, 2) else {
        panic!("an edit is expected");
    };
    assert_eq!(record.apply(twice), Err(EditError::Duplicate(1)));
    let proved = Edit::Proved { local: LocalNic(9) };
    assert_eq!(record.apply(proved), Err(EditError::UnknownNic(9)));
    assert_eq!(
        record.apply(Edit::Unregister {
            region: RegionId(8)
        }),
        Ok(false)
    );
    assert_eq!(rendered(&record), before);
}

#[test]
fn an_edit_that_cannot_be_made_is_refused_and_makes_no_generation() {
    let mut rig = Rig::new(TestStore::default(), &["a"]);
    let generation = rig.publisher.generation();
    let local = LocalNic(9);
    rig.input(Input::Edit(Edit::Proved { local }));
    let refused = Action::EditRefused(EditError::UnknownNic(9));
    assert_eq!(rig.log.last(), Some(&refused));
    assert_eq!(rig.publisher.generation(), generation);
}

#[test]
fn a_nic_that_is_added_is_last_and_down_and_gets_its_keys_later() {
    let mut record = local_record(&["a"], PublishOrder::Fixed);
    apply(&mut record, port(0, true, "10.0.0.1"));
    apply(&mut record, register(1, 1));
    let (local, name) = (LocalNic(1), "b".to_owned());
    assert_eq!(record.apply(Edit::Nic { local, name }), Ok(true));
    // Whoever registered this had not heard of it.
    apply(&mut record, register(2, 1));
    let descriptor = rendered(&record);
    assert_eq!(names(&descriptor), ["a", "b"]);
    let keys: Vec<_> = descriptor
        .buffers
        .iter()
        .map(|buffer| &buffer.rkey[..])
        .collect();
    assert_eq!(keys, [[1, 0], [2, 0]]);
    assert_eq!(
        descriptor.rerail.expect("ours").devices[1].state,
        DeviceState::Down
    );
    let pair = |rkey| KeyPair { lkey: rkey, rkey };
    let keys = BTreeMap::from([(RegionId(1), pair(8)), (RegionId(2), pair(9))]);
    assert_eq!(record.apply(Edit::Rekey { local, keys }), Ok(true));
    apply(&mut record, port(1, true, "10.0.0.2"));
    let descriptor = rendered(&record);
    let keys: Vec<_> = descriptor
        .buffers
        .iter()
        .map(|buffer| &buffer.rkey[..])
        .collect();
    assert_eq!(keys, [[1, 8], [2, 9]]);
    // The first that is learnt of it is no recovery.
    assert_eq!(
        descriptor.rerail.expect("ours").devices[1].state,
        DeviceState::Up
    );
}

#[test]
fn a_nic_that_was_opened_again_gets_its_new_keys_and_no_other_does() {
    let mut record = local_record(&["a", "b"], PublishOrder::Fixed);
    apply(&mut record, register(1, 2));
    let keys = BTreeMap::from([(RegionId(1), KeyPair { lkey: 8, rkey: 9 })]);
    let local = LocalNic(1);
    assert_eq!(record.apply(Edit::Rekey { local, keys }), Ok(true));
    let descriptor = rendered(&record);
    assert_eq!(descriptor.buffers[0].rkey, [1, 9]);
    assert_eq!(descriptor.buffers[0].lkey, [1, 8]);
}

/// Lets so many NICs become what takes the most room, with new keys for all memory.
fn enlarge(record: &mut LocalRecord, nics: u32, regions: u64) {
    let longest = Gid([0xff; 16]);
    for local in (0..nics).map(LocalNic) {
        let mut facts = facts(true, "10.0.0.1");
        (facts.lid, facts.speed_mbps) = (u16::MAX, u32::MAX);
        facts.gid.as_mut().expect("one").gid = longest;
        for up in [true, false, true] {
            facts.up = up;
            let (facts, gids) = (facts.clone(), vec![longest; 8]);
            apply(record, Input::Edit(Edit::Port { local, facts, gids }));
        }
        let pair = KeyPair {
            lkey: u32::MAX,
            rkey: u32::MAX,
        };
        let keys = (0..regions).map(|region| (RegionId(region), pair));
        let keys = keys.collect();
        apply(record, Input::Edit(Edit::Rekey { local, keys }));
    }
}

#[test]
fn the_largest_record_is_as_large_as_it_becomes_by_itself_and_with_one_more_nic() {
    const LATE: &str = "a_nic_that_comes_late_and_has_a_long_name";
    const REGIONS: u64 = 4;
    // Of a path MTU it says more digits than there are.
    const SPARE: usize = 3 * 6;
    let size = |descriptor: SegmentDescriptor| descriptor.to_json(JsonForm::Line).len();
    let mut record = local_record(&["a", "b"], PublishOrder::Fixed);
    for region in 0..REGIONS {
        apply(&mut record, register(region, 2));
    }
    let largest = |record: &LocalRecord, more| size(record.render_largest(instance(1), more));
    let (alone, with_late) = (largest(&record, None), largest(&record, Some(LATE)));
    enlarge(&mut record, 2, REGIONS);
    let becomes = size(record.render(instance(1), u64::MAX));
    assert!(
        (becomes..=becomes + SPARE).contains(&alone),
        "{becomes} {alone}"
    );
    let (local, name) = (LocalNic(2), LATE.to_owned());
    apply(&mut record, Input::Edit(Edit::Nic { local, name }));
    let location = LocationNics {
        preferred: vec!["a".to_owned()],
        available: vec!["b".to_owned(), LATE.to_owned()],
    };
    let matrix = BTreeMap::from([("cpu:0".to_owned(), location)]);
    apply(&mut record, Input::Edit(Edit::Matrix(matrix)));
    enlarge(&mut record, 3, REGIONS);
    let becomes = size(record.render(instance(1), u64::MAX));
    assert!(
        (becomes..=becomes + SPARE).contains(&with_late),
        "{becomes} {with_late}"
    );
}
