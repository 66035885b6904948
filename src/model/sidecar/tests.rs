use super::*;
use crate::error::Result;
use crate::model::metadata::Metadata;
use crate::model::preflight::Header;
use crate::model::routing_weights::Linear;
use crate::model::testing::{
    Mutations, TemporaryFile, model_keys, small_geometry, take_largest_request,
};
use crate::model::{Model, RoutingWeights};

const FINGERPRINT: [u8; 32] = [0xa5; 32];

/// Numbers that tell every place apart.
fn counting(rows: usize, cols: usize, start: f32) -> Linear {
    let number = |i: usize| start + i as f32 / 64.0;
    Linear {
        rows,
        cols,
        weight: (0..rows * cols).map(number).collect(),
        bias: (0..rows).map(|i| -number(i)).collect(),
    }
}

fn full_sidecar() -> Sidecar {
    let geometry = small_geometry();
    let mut routing = RoutingWeights::untrained(&geometry, 4, 11).unwrap();
    routing.layers[1].threshold = vec![0.1, 0.2, 0.3, 0.4];
    let layers = [counting(6, 11, 1.0), counting(5, 6, 2.0), counting(3, 5, 3.0)];
    Sidecar {
        routing: Some(routing),
        gate: Some(GateMlp { r_max: 3, input_dim: 11, layers }),
        dense_layers: Some(vec![0]),
    }
}

fn parse(file: &[u8]) -> Result<Sidecar> {
    let geometry = small_geometry();
    sidecar_reader::parse(file, &Target { geometry: &geometry, fingerprint: &FINGERPRINT })
}

#[track_caller]
fn assert_refused(writer: &GgufWriter, message: &str) {
    let error = parse(&writer.finish()).unwrap_err();
    assert!(error.message.contains(message), "{error}, expected {message}");
    assert!(!error.message.contains('\n'), "{error}");
}

/// What every sidecar begins with, for the small geometry.
fn target_keys() -> GgufWriter {
    let mut writer = GgufWriter::new();
    writer
        .text("general.architecture", ARCHITECTURE)
        .u32(KEY_VERSION, 1)
        .u32(KEY_LAYERS, 2)
        .u32_array(KEY_HEADS, &[4, 4])
        .u32_array(KEY_KV_HEADS, &[2, 2])
        .u32(KEY_KEY_DIM, 8)
        .u32(KEY_VALUE_DIM, 8);
    writer
}

#[test]
fn what_is_written_is_read_again() {
    let geometry = small_geometry();
    let file = TemporaryFile::unwritten();
    for sidecar in [full_sidecar(), Sidecar::default()] {
        sidecar.write(file.path(), &geometry, Some(&FINGERPRINT)).unwrap();
        assert_eq!(Sidecar::read(file.path(), &geometry, &FINGERPRINT).unwrap(), sidecar);
    }
}

#[test]
fn a_model_carries_its_sidecar() {
    let model_file = TemporaryFile::with(&model_keys("llama").finish());
    let model = Model::from_gguf(model_file.path(), None).unwrap();
    let file = TemporaryFile::unwritten();
    full_sidecar().write(file.path(), &model.geometry, Some(&model.fingerprint)).unwrap();
    let model = Model::from_gguf(model_file.path(), Some(file.path())).unwrap();
    assert_eq!(model.sidecar, Some(full_sidecar()));
    let error = Model::from_gguf(model_file.path(), Some(model_file.path())).unwrap_err();
    assert!(error.message.contains("expected \"sekv-sidecar\""), "{error}");
}

#[test]
fn matrices_stand_as_documented() {
    let file = full_sidecar().encode(&small_geometry(), None);
    let header = Header::scan(&file).unwrap();
    let shape = |name: &str| header.tensor(name).unwrap().dims;
    assert_eq!(shape("blk.1.sekv.route.weight"), [8, 4, 4, 1]);
    assert_eq!(shape("blk.1.sekv.route.threshold"), [4, 1, 1, 1]);
    assert_eq!(shape("sekv.gate.0.weight"), [11, 6, 1, 1]);
    assert_eq!(shape("sekv.gate.2.bias"), [3, 1, 1, 1]);
    let metadata = Metadata::decode(&header).unwrap();
    assert_eq!(metadata.count("sekv.route.summary_length").unwrap(), Some(4));
    assert_eq!(metadata.text("sekv.model.fingerprint").unwrap(), None);
}

#[test]
fn half_precision_is_read() {
    let mut writer = target_keys();
    writer.u32(KEY_SUMMARY_DIM, 1);
    let halves = |n: usize| half::f16::from_f32(0.25).to_le_bytes().repeat(n);
    for layer in 0..2 {
        writer.tensor(&projection_name(layer), &[8, 1, 4], 1, halves(32));
        writer.tensor(&threshold_name(layer), &[4], 1, halves(4));
    }
    let routing = parse(&writer.finish()).unwrap().routing.unwrap();
    assert_eq!(routing.layers[1].projection, [0.25; 32]);
    assert_eq!(routing.layers[1].threshold, [0.25; 4]);
}

#[test]
fn refuses_a_sidecar_of_another_model() {
    let mut geometry = small_geometry();
    let file = full_sidecar().encode(&geometry, Some(&FINGERPRINT));
    let error_for = |geometry: &_, fingerprint: &_| {
        let target = Target { geometry, fingerprint };
        sidecar_reader::parse(&file, &target).unwrap_err().message
    };
    assert!(error_for(&geometry, &[0; 32]).contains("fingerprint"));
    geometry.layers[1].n_kv_heads = 4;
    assert!(error_for(&geometry, &FINGERPRINT).contains("head_count_kv is 2 in layer 1"));
    geometry.layers.pop();
    assert!(error_for(&geometry, &FINGERPRINT).contains("block_count is 2"));
    let mut geometry = small_geometry();
    geometry.key_dim = 16;
    assert!(error_for(&geometry, &FINGERPRINT).contains("key_length is 8"));
}

#[test]
fn refuses_head_counts_for_more_layers_than_there_are() {
    let mut writer = GgufWriter::new();
    writer
        .text("general.architecture", ARCHITECTURE)
        .u32(KEY_VERSION, 1)
        .u32(KEY_LAYERS, 2)
        .u32_array(KEY_HEADS, &[4, 4, 4])
        .u32(KEY_KV_HEADS, 2)
        .u32(KEY_KEY_DIM, 8)
        .u32(KEY_VALUE_DIM, 8);
    assert_refused(&writer, "has 3 values");
}

#[test]
fn without_a_fingerprint_any_model_of_the_shape_will_do() {
    let file = full_sidecar().encode(&small_geometry(), None);
    assert_eq!(parse(&file).unwrap(), full_sidecar());
}

#[test]
fn refuses_what_it_does_not_know() {
    let mut writer = target_keys();
    writer.u32("sekv.route.summary_lenght", 4);
    assert_refused(&writer, "\"sekv.route.summary_lenght\" is not known");
    let mut writer = target_keys();
    writer.f32_tensor("blk.0.sekv.route.weight", &[1], &[0.0]);
    assert_refused(&writer, "\"blk.0.sekv.route.weight\" is not expected");
    let mut writer = GgufWriter::new();
    writer.text("general.architecture", ARCHITECTURE).u32(KEY_VERSION, 2);
    assert_refused(&writer, "version is 2");
    let mut writer = target_keys();
    writer.text("general.name", "trained on a rainy day");
    assert_eq!(parse(&writer.finish()).unwrap(), Sidecar::default());
}

#[test]
fn refuses_tensors_that_are_missing_misshapen_or_of_another_type() {
    let mut writer = target_keys();
    writer.u32(KEY_SUMMARY_DIM, 4);
    assert_refused(&writer, "\"blk.0.sekv.route.weight\" is missing");
    let mut misshapen = writer.clone();
    misshapen.f32_tensor(&projection_name(0), &[4, 8, 4], &[0.0; 128]);
    assert_refused(&misshapen, "has shape [4, 8, 4, 1], expected [8, 4, 4, 1]");
    let mut integers = writer.clone();
    integers.tensor(&projection_name(0), &[8, 4, 4], 26, vec![0; 512]);
    assert_refused(&integers, "is of type I32, expected F32 or F16");
    writer.f32_tensor(&projection_name(0), &[8, 4, 4], &[f32::INFINITY; 128]);
    assert_refused(&writer, "holds inf at 0");
}

#[test]
fn refuses_numbers_outside_their_range() {
    let mut writer = target_keys();
    writer.u32_array(KEY_DENSE_LAYERS, &[1, 0]);
    assert_refused(&writer, "the dense layers are [1, 0]");
    let mut writer = target_keys();
    writer.u32_array(KEY_DENSE_LAYERS, &[2]);
    assert_refused(&writer, "below 2");
    let mut writer = target_keys();
    writer.u32(KEY_GATE_RANK, u32::MAX);
    assert_refused(&writer, "is 4294967295");

    let geometry = small_geometry();
    let mut sidecar = full_sidecar();
    sidecar.routing.as_mut().unwrap().layers[0].threshold[2] = 1.5;
    let error = sidecar.write(Path::new("/nowhere"), &geometry, None).unwrap_err();
    assert!(error.message.contains("threshold of layer 0 is 1.5"), "{error}");
    let mut sidecar = full_sidecar();
    sidecar.gate.as_mut().unwrap().layers[1].cols = 7;
    assert!(sidecar.validate(&geometry).unwrap_err().message.contains("layer 1 of the rank gates"));
}

#[test]
fn a_failed_write_leaves_nothing_behind() {
    let path = std::env::temp_dir().join("no such folder").join("sidecar.gguf");
    let error = full_sidecar().write(&path, &small_geometry(), None).unwrap_err();
    assert_eq!(error.status, Status::Io);
    assert!(error.message.contains("no such folder"), "{error}");
}

/// The seed is fixed, so that a failure comes again.
#[test]
fn damaged_sidecars_end_in_errors_never_in_panics() {
    let geometry = small_geometry();
    let file = full_sidecar().encode(&geometry, Some(&FINGERPRINT));
    let mut random = Mutations::new(0xdeca);
    for _ in 0..20_000 {
        let file = random.mutate(&file);
        take_largest_request();
        let result = parse(&file);
        let largest = take_largest_request();
        assert!(largest < 1 << 17, "{largest} bytes for a file of {}", file.len());
        if let Ok(sidecar) = result {
            sidecar.validate(&geometry).unwrap();
        }
    }
}
