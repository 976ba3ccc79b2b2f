use std::collections::BTreeMap;

use rerail_verbs::types::Gid;
use serde_json::json;

use super::*;

/// The reference's illustration, compact and in wire order.
const GOLDEN: &str = concat!(
    r#"{"buffers":[{"addr":139904115408896,"length":1073741824,"lkey":[4097,8193],"#,
    r#""name":"cpu:0","rkey":[4097,8193]}],"#,
    r#""devices":[{"gid":"00:00:00:00:00:00:00:00:00:00:ff:ff:0a:0e:01:02","lid":0,"name":"mlx5_0"},"#,
    r#"{"gid":"00:00:00:00:00:00:00:00:00:00:ff:ff:0a:0e:01:03","lid":0,"name":"mlx5_1"}],"#,
    r#""name":"node1:15428","priority_matrix":{"cpu:0":[["mlx5_0"],["mlx5_1"]]},"#,
    r#""protocol":"rdma","tcp_data_port":0,"tcp_proto_version":1,"#,
    r#""timestamp":"2026-08-22 10:11:12.000345"}"#
);

fn golden_value() -> SegmentDescriptor {
    let gid = |text: &str| text.parse::<Gid>().expect("a valid GID");
    SegmentDescriptor {
        devices: vec![
            Device::new("mlx5_0", 0, gid("10.14.1.2")),
            Device::new("mlx5_1", 0, gid("10.14.1.3")),
        ],
        buffers: vec![Buffer {
            name: "cpu:0".into(),
            addr: 139_904_115_408_896,
            length: 1 << 30,
            rkey: vec![4097, 8193],
            lkey: vec![4097, 8193],
            ..Buffer::default()
        }],
        priority_matrix: BTreeMap::from([(
            "cpu:0".to_owned(),
            LocationNics {
                preferred: vec!["mlx5_0".into()],
                available: vec!["mlx5_1".into()],
            },
        )]),
        timestamp: "2026-08-22 10:11:12.000345".into(),
        ..SegmentDescriptor::new("node1:15428", Protocol::rdma())
    }
}

#[test]
fn an_rdma_segment_has_the_golden_bytes() {
    let text = golden_value().to_json(JsonForm::Bare);
    assert_eq!(String::from_utf8_lossy(&text), GOLDEN);
    assert_eq!(
        SegmentDescriptor::from_json(GOLDEN.as_bytes()),
        Ok(golden_value())
    );
}

#[test]
fn a_line_ends_with_one_newline_and_an_http_body_with_none() {
    let line = golden_value().to_json(JsonForm::Line);
    assert_eq!(line.strip_suffix(b"\n"), Some(GOLDEN.as_bytes()));
    assert_eq!(SegmentDescriptor::from_json(&line), Ok(golden_value()));
}

#[test]
fn a_tcp_segment_has_the_golden_bytes() {
    let segment = SegmentDescriptor {
        buffers: vec![Buffer::tcp("10.0.0.1:12345", 4096, 8192)],
        tcp_data_port: 15_002,
        tcp_proto_version: 2,
        tcp_data_host: Some("10.0.0.1".into()),
        timestamp: "t".into(),
        ..SegmentDescriptor::new("10.0.0.1:12345", Protocol::tcp())
    };
    assert_eq!(
        String::from_utf8_lossy(&segment.to_json(JsonForm::Bare)),
        concat!(
            r#"{"buffers":[{"addr":4096,"length":8192,"name":"10.0.0.1:12345"}],"#,
            r#""name":"10.0.0.1:12345","protocol":"tcp","tcp_data_host":"10.0.0.1","#,
            r#""tcp_data_port":15002,"tcp_proto_version":2,"timestamp":"t"}"#
        )
    );
}

#[test]
fn the_rerail_member_has_the_golden_bytes() {
    let member = RerailMember {
        instance: "0192f3a1b2c37d4e8f90123456789abc"
            .parse()
            .expect("32 digits"),
        generation: 7,
        features: vec!["push/1".into()],
        devices: vec![RerailDevice {
            name: "mlx5_0".into(),
            state: DeviceState::Recovering,
            mtu: 4096,
            speed_mbps: 200_000,
            gids: vec!["10.14.1.2".parse().expect("a valid GID")],
            unknown: UnknownMembers::new(),
        }],
        unknown: UnknownMembers::new(),
    };
    let segment = SegmentDescriptor {
        rerail: Some(member),
        ..SegmentDescriptor::new("n", Protocol::tcp())
    };
    let text = segment.to_json(JsonForm::Bare);
    assert_eq!(
        String::from_utf8_lossy(&text),
        concat!(
            r#"{"buffers":[],"name":"n","protocol":"tcp","rerail":{"devices":[{"gids":["#,
            r#""00:00:00:00:00:00:00:00:00:00:ff:ff:0a:0e:01:02"],"mtu":4096,"name":"mlx5_0","#,
            r#""speed_mbps":200000,"state":"recovering"}],"features":["push/1"],"generation":7,"#,
            r#""instance":"0192f3a1b2c37d4e8f90123456789abc"},"tcp_data_port":0,"#,
            r#""tcp_proto_version":1,"timestamp":""}"#
        )
    );
    assert_eq!(SegmentDescriptor::from_json(&text), Ok(segment));
}

#[test]
fn unknown_members_survive_a_read_modify_write_at_every_level() {
    let text = json!({
        "aaa": [1, {"z": 1, "b": 2}], "zzz": null, "name": "n", "protocol": "rdma",
        "buffers": [{"name": "cpu:0", "addr": 1, "length": 2, "rkey": [5], "lkey": [6], "hint": "x"}],
        "devices": [{"name": "d", "lid": 0, "gid": "fe:80:00:00:00:00:00:00:02:00:11:03:00:22:33:04",
                     "rail": 3}],
        "priority_matrix": {"cpu:0": [["d"], []]},
        "tcp_data_port": 0, "tcp_proto_version": 1, "timestamp": "t",
        "rerail": {"instance": "0192f3a1b2c37d4e8f90123456789abc", "generation": 1, "features": [],
                   "later": true,
                   "devices": [{"name": "d", "state": "up", "mtu": 1024, "speed_mbps": 1, "gids": [],
                                "more": 1.5}]}
    })
    .to_string();
    let mut segment = SegmentDescriptor::from_json(text.as_bytes()).expect("valid");
    assert_eq!(
        segment.to_json(JsonForm::Bare),
        text.as_bytes(),
        "untouched"
    );
    segment.tcp_data_port = 9;
    let written = segment.to_json(JsonForm::Bare);
    let expected = text.replace(r#""tcp_data_port":0"#, r#""tcp_data_port":9"#);
    assert_eq!(String::from_utf8_lossy(&written), expected);
}

#[test]
fn what_c_plus_plus_leaves_out_or_empty_reads_as_absent() {
    let text = br#"{"name":"n","protocol":"tcp","buffers":[],"rdma_server_name":""}"#;
    let segment = SegmentDescriptor::from_json(text).expect("valid");
    assert_eq!(segment.rdma_server_name, None);
    assert_eq!((segment.tcp_data_port, segment.tcp_proto_version), (0, 1));
    assert_eq!(segment.rerail, None);
}

#[test]
fn m08_the_published_sample_is_read_and_pairs_keys_with_devices() {
    let cases: serde_json::Value =
        serde_json::from_str(include_str!("../../tests/cases/metadata-config-cases.json"))
            .expect("the fixture is JSON");
    let segment = SegmentDescriptor::from_value(cases["segment_sample"]["value"].clone())
        .expect("the sample is valid");
    assert_eq!(segment.buffers[0].rkey.len(), segment.devices.len());
    assert_eq!(segment.device_index("mlx5_0"), Some(2));
    assert_eq!(segment.devices[2].lid, 364);
}

#[test]
fn every_refusal_names_the_member() {
    let good = json!({
        "name": "n", "protocol": "rdma", "tcp_data_port": 0,
        "buffers": [{"name": "cpu:0", "addr": 1, "length": 2, "rkey": [5], "lkey": [6]}],
        "devices": [{"name": "d", "lid": 0, "gid": "fe:80:00:00:00:00:00:00:02:00:11:03:00:22:33:04"}],
        "priority_matrix": {"cpu:0": [["d"], []]}
    });
    let cases = [
        ("/name", json!(3), "name"),
        ("/name", json!(""), "name"),
        ("/protocol", json!({}), "protocol"),
        ("/tcp_data_port", json!("15000"), "tcp_data_port"),
        ("/tcp_data_port", json!(65_536), "tcp_data_port"),
        ("/tcp_data_port", json!(-1), "tcp_data_port"),
        ("/buffers", json!({}), "buffers"),
        ("/buffers/0/name", json!(""), "buffers[0].name"),
        ("/buffers/0/addr", json!(0), "buffers[0].addr"),
        ("/buffers/0/addr", json!("0x10"), "buffers[0].addr"),
        ("/buffers/0/addr", json!(1.5), "buffers[0].addr"),
        ("/buffers/0/length", json!(0), "buffers[0].length"),
        ("/buffers/0/length", json!(u64::MAX), "buffers[0].length"),
        ("/buffers/0/rkey", json!([1, 2]), "buffers[0].rkey"),
        (
            "/buffers/0/rkey/0",
            json!(1_u64 << 32),
            "buffers[0].rkey[0]",
        ),
        ("/buffers/0/lkey/0", json!(null), "buffers[0].lkey[0]"),
        ("/devices", json!([]), "buffers[0].rkey"),
        ("/devices/0/name", json!(""), "devices[0].name"),
        ("/devices/0/gid", json!(""), "devices[0].gid"),
        ("/devices/0/gid", json!("fe80"), "devices[0].gid"),
        ("/devices/0/lid", json!(65_536), "devices[0].lid"),
        ("/priority_matrix", json!([]), "priority_matrix"),
        (
            "/priority_matrix/cpu:0",
            json!([["d"]]),
            "priority_matrix.cpu:0",
        ),
        (
            "/priority_matrix/cpu:0/1",
            json!([7]),
            "priority_matrix.cpu:0[1][0]",
        ),
    ];
    for (pointer, value, field) in cases {
        let mut broken = good.clone();
        *broken.pointer_mut(pointer).expect("a path of the good one") = value.clone();
        let error = SegmentDescriptor::from_value(broken)
            .expect_err(&format!("{pointer} = {value} must be refused"));
        assert_eq!(error.field(), Some(field), "{pointer} = {value}: {error}");
    }
    for text in ["", "[]", "nul", "{\"name\":\"n\"}", "\u{1}"] {
        assert!(
            SegmentDescriptor::from_json(text.as_bytes()).is_err(),
            "{text:?}"
        );
    }
    assert!(SegmentDescriptor::from_value(good).is_ok());
}

#[test]
fn a_broken_rerail_member_is_refused_by_name() {
    for (member, field) in [
        (json!("x"), "rerail"),
        (
            json!({"instance": "12", "generation": 1}),
            "rerail.instance",
        ),
        (
            json!({"instance": "0192f3a1b2c37d4e8f90123456789abc"}),
            "rerail.generation",
        ),
        (
            json!({"instance": "0192f3a1b2c37d4e8f90123456789abc", "generation": 1,
                   "devices": [{"name": "d", "state": "up", "gids": ["x"]}]}),
            "rerail.devices[0].gids[0]",
        ),
    ] {
        let text = json!({"name": "n", "protocol": "tcp", "rerail": member});
        let error = SegmentDescriptor::from_value(text).expect_err("must be refused");
        assert_eq!(error.field(), Some(field), "{error}");
    }
}

#[test]
fn other_protocols_pass_through_untouched() {
    let text = concat!(
        r#"{"buffers":[{"file_path":"/a","length":5,"local_path_map":{}}],"name":"nvmeof/foo","#,
        r#""protocol":"nvmeof","tcp_data_port":0,"tcp_proto_version":1,"timestamp":""}"#
    );
    let segment = SegmentDescriptor::from_json(text.as_bytes()).expect("valid");
    assert!(segment.buffers.is_empty());
    assert_eq!(segment.to_json(JsonForm::Bare), text.as_bytes());
}

#[test]
fn an_array_of_protocols_is_read_and_written() {
    let text = concat!(
        r#"{"buffers":[{"addr":1,"length":2,"name":"n","protocol":"tcp"}],"devices":[],"name":"n","#,
        r#""priority_matrix":{},"protocol":["tcp","rdma"],"tcp_data_port":0,"#,
        r#""tcp_proto_version":2,"timestamp":""}"#
    );
    let segment = SegmentDescriptor::from_json(text.as_bytes()).expect("valid");
    assert!(segment.protocol.includes("rdma") && segment.protocol.includes("tcp"));
    // Buffers of an array segment keep their own `protocol` member as an unknown one; the ones
    // without keys gain the empty arrays of the RDMA form.
    let again = SegmentDescriptor::from_json(&segment.to_json(JsonForm::Bare));
    assert_eq!(again, Ok(segment));
}

#[test]
fn rpc_meta_has_the_golden_bytes_and_a_port_in_range() {
    let meta = RpcMeta::new("10.0.0.1", 15_123);
    let text = br#"{"ip_or_host_name":"10.0.0.1","rpc_port":15123}"#;
    assert_eq!(meta.to_json(JsonForm::Bare), text);
    assert_eq!(RpcMeta::from_json(text), Ok(meta));
    for (text, field) in [
        (r#"{"ip_or_host_name":"h","rpc_port":0}"#, "rpc_port"),
        (r#"{"ip_or_host_name":"h","rpc_port":65536}"#, "rpc_port"),
        (r#"{"ip_or_host_name":"h","rpc_port":"1"}"#, "rpc_port"),
        (r#"{"ip_or_host_name":"","rpc_port":1}"#, "ip_or_host_name"),
        (r#"{"rpc_port":1}"#, "ip_or_host_name"),
    ] {
        let error = RpcMeta::from_json(text.as_bytes()).expect_err(text);
        assert_eq!(error.field(), Some(field), "{text}");
    }
}

#[test]
fn nic_paths_split_at_the_first_at_sign_and_prefer_the_rdma_name() {
    let path: NicPath = "host:1@mlx5_0@x".parse().expect("valid");
    assert_eq!((path.server(), path.device()), ("host:1", "mlx5_0@x"));
    for text in ["", "host", "@mlx5_0", "host@"] {
        assert!(text.parse::<NicPath>().is_err(), "{text}");
    }
    let mut segment = golden_value();
    assert_eq!(segment.nic_path("mlx5_0").to_string(), "node1:15428@mlx5_0");
    segment.rdma_server_name = Some("10.0.0.9:15428".into());
    assert_eq!(
        segment.nic_path("mlx5_0").to_string(),
        "10.0.0.9:15428@mlx5_0"
    );
    segment.rdma_server_name = Some(String::new());
    assert_eq!(segment.nic_path("mlx5_0").to_string(), "node1:15428@mlx5_0");
}
