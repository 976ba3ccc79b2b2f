//! How the record is rendered.

use super::*;
use rerail_metadata::descriptor::DeviceState;

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
