"""The files that mutations break, and the tests of each that shall notice."""

TREE = "das/_tree.pyx"
PLACES = "das/_tree.pxd"
ARRAYS = "das/_tree_arrays.pxd"
MEMORY = "das/_tree_arrays.pyx"
SUFFIX_TREE = "das/_suffix_tree.pyx"
PROMPT_TREE = "das/prompt_tree.py"
DRAFT = "das/_draft.pyx"
DRAFT_TREE = "das/_draft_tree.pyx"
LIVE = "das/_live_requests.pyx"
RECORD = "das/prompt_record.py"
HISTORY = "das/history.py"
COMMON = "das/common_text.py"
BUDGET = "das/budget.py"
THROUGHPUT = "das/throughput_budget.py"
LENGTH_BUDGET = "das/length_budget.py"
CLASS_BUDGET = "das/class_budget.py"
ADAPTIVE = "das/adaptive_budget.py"
LENGTHS = "das/lengths.py"
LENGTH_COUNTS = "das/_length_counts.pyx"
CHANCES = "das/_chances.pyx"
CLASSES = "das/length_classes.py"
MAKESPAN = "das/makespan.py"
CURVE = "das/acceptance_curve.py"
EVENTS = "das/analysis/events.py"
WORKER = "das/analysis/worker.py"
PROJECTION = "das/analysis/projection.py"
LATENCY = "das/latency.py"
CONFIDENCE = "das/confidence.py"
DRAFTER = "das/drafter.py"
REQUEST = "das/live_request.py"
RULE = "das/_rule.pyx"
HEDGE = "das/_hedge.pyx"
HEDGE_STATE = "das/hedge.py"
RELIABILITY = "das/reliability.py"
STEP = "das/step.py"
LOGS = "das/analysis/logs.py"
FORMATS = "das/analysis/formats/__init__.py"
SEQUENCE_LOGS = "das/analysis/formats/sequence_logs.py"
TORCH_ARCHIVE = "das/analysis/containers/torch_archive.py"
CONVERSATIONS = "das/analysis/conversations.py"
LOGGED = "das/analysis/logged_request.py"
ORIGINS = "das/draft_origins.py"
RECORDING = "das/analysis/recording.py"
REPORT_PAGE = "das/analysis/report/page.py"
REPORT_TOKENS = "das/analysis/report/token_view.py"
REPORT_TIMES = "das/analysis/report/times.py"
REPORT_HEADLINE = "das/analysis/report/headline.py"
CHECKED_FILE = "das/checked_file.py"
SEGMENT = "das/rollout_segment.py"
DIRECTORY = "das/state_directory.py"
STATE = "das/state.py"

TREE_TESTS = ("test_suffix_tree.py", "test_suffix_tree_machine.py", "test_suffix_tree_laws.py")
HISTORY_TESTS = (
    "test_common_text.py",
    "test_details.py",
    "test_history.py",
    "test_history_trees.py",
    "test_history_machine.py",
    "test_drafter.py",
)
DRAFT_TESTS = (
    "test_common_text.py",
    "test_drafter.py",
    "test_extend_batch.py",
    "test_confidence.py",
    "test_step.py",
    "test_widths.py",
    "test_details.py",
    "test_drafting_rule.py",
    "test_drafter_errors.py",
)
STATE_TESTS = ("test_state.py", "test_state_files.py", "test_state_crashes.py", "test_state_machine.py")
TESTS = {
    TREE: TREE_TESTS,
    PLACES: (*TREE_TESTS, *DRAFT_TESTS),
    ARRAYS: TREE_TESTS,
    MEMORY: (
        "test_suffix_tree.py",
        "test_suffix_tree_errors.py",
        "test_huge_pages.py",
        "test_leaks.py",
        "test_details.py",
    ),
    DRAFT: (*DRAFT_TESTS, "test_rule.py", "test_hedge.py"),
    SUFFIX_TREE: ("test_suffix_tree.py", "test_suffix_tree_errors.py", "test_history_trees.py"),
    PROMPT_TREE: ("test_history_trees.py",),
    DRAFT_TREE: ("test_draft_tree.py",),
    LIVE: (*DRAFT_TESTS, "test_draft_tree.py"),
    RECORD: (*HISTORY_TESTS, "test_rollout_identity.py", "test_state.py"),
    HISTORY: (*HISTORY_TESTS, "test_leaks.py", "test_state.py"),
    COMMON: ("test_common_text.py",),
    THROUGHPUT: ("test_budget.py", "test_widths.py"),
    LENGTH_BUDGET: ("test_length_budget.py",),
    CLASS_BUDGET: ("test_class_budget.py",),
    ADAPTIVE: ("test_adaptive_budget.py",),
    LENGTHS: ("test_lengths.py", "test_length_streams.py"),
    LENGTH_COUNTS: ("test_lengths.py", "test_length_streams.py"),
    CHANCES: ("test_length_budget.py",),
    CLASSES: ("test_length_classes.py",),
    MAKESPAN: ("test_makespan.py",),
    CURVE: ("test_acceptance_curve.py",),
    EVENTS: ("test_simulate.py",),
    WORKER: ("test_simulate.py",),
    PROJECTION: ("test_simulate.py", "test_simulate_command.py"),
    STEP: ("test_step.py", "test_widths.py"),
    LATENCY: ("test_latency.py",),
    CONFIDENCE: ("test_confidence.py",),
    DRAFTER: ("test_common_text.py",),
    RULE: ("test_rule.py",),
    HEDGE: ("test_hedge.py",),
    HEDGE_STATE: ("test_hedge.py",),
    REQUEST: ("test_common_text.py", "test_drafter_failures.py"),
    RELIABILITY: ("test_reliability.py",),
    LOGS: ("test_logs.py", "test_log_errors.py", "test_log_formats.py", "test_conversations.py"),
    FORMATS: ("test_log_formats.py",),
    SEQUENCE_LOGS: ("test_log_formats.py",),
    TORCH_ARCHIVE: ("test_torch_archive.py",),
    CONVERSATIONS: ("test_conversations.py",),
    LOGGED: ("test_conversations.py",),
    ORIGINS: ("test_draft_origins.py",),
    RECORDING: ("test_recording.py",),
    REPORT_PAGE: ("test_report.py",),
    REPORT_TOKENS: ("test_report.py",),
    REPORT_TIMES: ("test_recording.py",),
    REPORT_HEADLINE: ("test_report.py",),
    CHECKED_FILE: STATE_TESTS,
    SEGMENT: STATE_TESTS,
    DIRECTORY: STATE_TESTS,
    STATE: STATE_TESTS,
}
