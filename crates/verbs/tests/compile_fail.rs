//! What safe code must not be able to write.

#[test]
fn only_host_memory_can_be_registered() {
    let cases = trybuild::TestCases::new();
    cases.compile_fail("tests/compile_fail/*.rs");
}
