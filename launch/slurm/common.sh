# Sourced by the scripts of this folder, which sbatch runs on the first node of a job. docs/slurm.md tells the whole story.
#
# CONFIG      YAML file; each script has its own default. Arguments of the script are overrides: trainer.updates=10
# PYTHON      the Python that has this package (default: .venv/bin/python)
# MODULES     modules to load first, separated by spaces
# CONTAINER   an image to run everything in: *.sif by apptainer, anything else by pyxis/enroot
# MOUNTS      further folders for the container, A:B,C:D (the folder of submission is always there)
# PREFLIGHT   0: take all nodes as good without looking at them
# MIN_GIB_PER_SECOND     GiB/s that a node must exchange with a neighbour to be good (default: 0, any)
# STEP_EXIT_SECONDS  limit for both steps to end after the job has (default: 120)
# GRACE_SECONDS    limit for the checkpoint after a signal (default: until 45 s before Slurm ends the job, at most an hour)
# FARM_PORT   train_split.sh: the browsers' router listens there, their nodes at the next (default: 8700)
# DRY_RUN     1: print each process with its place and command, and start nothing; needs no Slurm
# STUB_COMMAND    a command that takes the place of every trainer rank and rollout worker, on the same cores and devices
if [ -n "${MODULES:-}" ] && ! type module >/dev/null 2>&1; then
    for file in /etc/profile.d/{lmod,z00_lmod,modules}.sh; do [ ! -r "$file" ] || source "$file"; done
fi
for module in ${MODULES:-}; do module load "$module" || exit; done
set -euo pipefail

PYTHON=${PYTHON:-$PWD/.venv/bin/python}
STEP_EXIT_SECONDS=${STEP_EXIT_SECONDS:-120}

log() { echo "job: $*"; }

# webrl ARGUMENTS: on this node, in the container where apptainer runs it.
webrl() { "${CONTAINER_COMMAND[@]}" "$PYTHON" -m megatron_webrl.cli "$@"; }

# run_on "NODES" ARGUMENTS: webrl once on each of these nodes, as one step of the job.
run_on() {
    local nodes count
    read -ra nodes <<<"$1"
    count=${#nodes[@]}
    shift
    # The placement binds: Slurm must not. All steps share the nodes, GPUs and memory included.
    srun --overlap ${GROUP:+--het-group="$GROUP"} --nodes="$count" --ntasks="$count" --ntasks-per-node=1 \
        --nodelist="$(IFS=,; echo "${nodes[*]}")" --cpu-bind=none --mem-bind=none --mpi=none --unbuffered \
        ${SRUN_OPTIONS:---kill-on-bad-exit=1} "${CONTAINER_OPTIONS[@]}" \
        "${CONTAINER_COMMAND[@]}" "$PYTHON" -m megatron_webrl.cli "$@"
}

# A step of the job in the background; if it fails, the job ends with that reason, unless it has ended before.
start_step() {
    local role=$1 code=0
    run_on "$NODES" node "$role" "$SETTINGS" "${STUB_ARGUMENTS[@]}" || code=$?
    [ "$code" = 0 ] || run_on "$FIRST" node stop "$SETTINGS" --failed "the $role step ended with code $code"
}

# address_of NODE: the address by which other nodes reach it.
address_of() {
    local found ip
    found=$(scontrol show node --oneliner "$1" | sed -n 's/.* NodeAddr=\([^ ]*\).*/\1/p')
    found=${found:-$1}
    ip=$(getent ahostsv4 "$found" | awk 'NR == 1 { print $1 }')
    if [[ $ip == 127.* && $found != 127.* ]]; then # this node itself, as /etc/hosts has it on some systems
        ip=$(hostname -I | awk '{ print $1 }')
    fi
    echo "${ip:-$found}"
}

# start_browser_farm CONFIG OVERRIDES: the job's browsers, on the nodes of the second part of a heterogeneous job.
start_browser_farm() {
    local nodes port=${FARM_PORT:-8700}
    [ -z "${DRY_RUN:-}" ] || return 0
    mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST_HET_GROUP_1")
    export WEBRL_BROWSERS_TOKEN=${WEBRL_BROWSERS_TOKEN:-$(head -c 24 /dev/urandom | base64)}
    local address
    address=$(address_of "${nodes[0]}")
    FARM=http://$address:$port
    log "browsers on ${#nodes[@]} nodes: $SLURM_JOB_NODELIST_HET_GROUP_1, router $FARM"
    GROUP=1 run_on "${nodes[0]}" browsers route --die-with-parent --host "$address" --port "$port" &
    GROUP=1 run_on "${nodes[*]}" node browsers "$@" --router "$FARM" --port $((port + 1)) --nodes "${#nodes[@]}" &
}

# job_field FIELD: what Slurm says of this job.
job_field() { scontrol show job --oneliner "$SLURM_JOB_ID" | awk -v field="$1=" 'NR == 1 { for (i = 1; i <= NF; i++)
    if (index($i, field) == 1) print substr($i, length(field) + 1) }'; }

# Whether the job runs in the grace period of a pre-emption.
preempted() {
    [ "$(job_field JobState)" = RUNNING ] || return 1
    case $(job_field PreemptTime) in "" | None) return 1 ;; esac
}

# handle_signal SIGNAL: a trap. The job will end soon: the time limit is near (sbatch --signal), or it is pre-empted. The run is to
# end before, with a checkpoint. The SIGTERM of scancel and of the time limit itself is the end.
handle_signal() {
    local end seconds=3600 now
    if [ "$1" = TERM ] && ! preempted; then
        log "ended by SIGTERM"
        exit 143
    fi
    [ -z "$NOTICE" ] || return 0
    NOTICE=SIG$1
    now=$(date +%s)
    end=$(job_field EndTime) # "Unknown" without a limit
    if [ -n "$end" ] && end=$(date -d "$end" +%s 2>/dev/null); then
        seconds=$((end - now - 45)) # to end all roles, and to ask Slurm for another start
        seconds=$((seconds > 3600 ? 3600 : seconds < 10 ? 10 : seconds))
    fi
    seconds=${GRACE_SECONDS:-$seconds}
    LATE=$((SECONDS + seconds))
    log "$NOTICE: the job will end, and has $seconds s for a checkpoint"
    [ -z "${CONTROL:-}" ] || run_on "$FIRST" node stop "$SETTINGS" --preempted &
}

# requeue WHY: have Slurm start the job again, which goes on from the newest checkpoint; what still runs ends with this.
requeue() {
    trap '' USR1 TERM
    [ "$(job_field JobState)" = RUNNING ] || exit 1 # it was cancelled
    log "$1; Slurm is asked to start it again"
    scontrol requeue "$SLURM_JOB_ID" || { log "it does not: submit it again with run.resume=true"; exit 1; }
    exit 0
}

# deadline_passed: the update under way is too long for the time that is left.
deadline_passed() {
    local since=$SECONDS words="no checkpoint in the time after $NOTICE"
    run_on "$FIRST" node stop "$SETTINGS" --failed "$words" || true
    while kill -0 "$CONTROL" 2>/dev/null && ((SECONDS - since < 20)); do sleep 1; done # it writes the summary
    requeue "$words: it goes on from the last one"
}

# exit_without_nodes CODE: no nodes were chosen. A job that Slurm has started again is held, so that it keeps its place.
exit_without_nodes() {
    if [ "$1" = 76 ] && [ "${SLURM_RESTART_COUNT:-0}" != 0 ]; then
        trap '' USR1 TERM
        log "held: scontrol update JobId=$SLURM_JOB_ID ExcNodeList=NODES; scontrol release $SLURM_JOB_ID"
        scontrol requeuehold "$SLURM_JOB_ID" && exit 0
    fi
    exit "$1"
}

# run_job CONFIG OVERRIDES: the whole job, on the nodes that Slurm gave.
run_job() {
    local allocated restarts=${SLURM_RESTART_COUNT:-0}
    STUB_ARGUMENTS=(${STUB_COMMAND:+--stub-command "$STUB_COMMAND"})
    if [ -n "${DRY_RUN:-}" ]; then
        webrl node commands "$@" "${STUB_ARGUMENTS[@]}"
        return
    fi
    mapfile -t allocated < <(scontrol show hostnames "${SLURM_JOB_NODELIST_HET_GROUP_0:-$SLURM_JOB_NODELIST}")
    NOTICE="" LATE=0
    trap 'handle_signal USR1' USR1
    trap 'handle_signal TERM' TERM
    log "${SLURM_JOB_ID} on ${#allocated[@]} nodes: ${SLURM_JOB_NODELIST}$( ((restarts == 0)) || echo ", started again, time $restarts")"
    SETTINGS=$(run_on "${allocated[0]}" node prepare "$@" "${STUB_ARGUMENTS[@]}" ${FARM:+--farm "$FARM"} | tail -n 1)
    log "configuration: $SETTINGS"
    local unchecked=()
    if [ "${PREFLIGHT:-1}" = 0 ]; then
        unchecked=(--unchecked)
    else
        # A check that hangs or breaks off must not end those of the other nodes.
        SRUN_OPTIONS="--kill-on-bad-exit=0 --time=20" run_on "${allocated[*]}" node check "$SETTINGS" "${allocated[@]}" \
            --first-address "$(address_of "${allocated[0]}")" --min-gib-per-second "${MIN_GIB_PER_SECOND:-0}" || log "the check did not end well on every node"
    fi
    NODES=$(run_on "${allocated[0]}" node choose "$SETTINGS" "${allocated[@]}" "${unchecked[@]}") || exit_without_nodes "$?"
    FIRST=${NODES%% *}
    log "nodes: $NODES"
    [ -z "$NOTICE" ] || requeue "nothing has begun"
    run_on "$FIRST" node control "$SETTINGS" --host "$(address_of "$FIRST")" &
    CONTROL=$!
    start_step rollout &
    local rollout=$!
    start_step trainer &
    local trainer=$! outcome=0
    while kill -0 "$CONTROL" 2>/dev/null; do # `wait` would return at a signal
        [ -z "$NOTICE" ] || ((SECONDS < LATE)) || deadline_passed
        sleep 1
    done
    wait "$CONTROL" || outcome=$?
    local since=$SECONDS
    while { kill -0 "$rollout" || kill -0 "$trainer"; } 2>/dev/null; do
        if ((SECONDS - since > STEP_EXIT_SECONDS)) || { [ -n "$NOTICE" ] && ((SECONDS >= LATE)); }; then
            log "a step did not end within $((SECONDS - since)) s and is killed"
            break
        fi
        sleep 1
    done
    case $outcome in
        0) ;;
        75) requeue "pre-empted, with a checkpoint" ;;
        *) if [ -n "$NOTICE" ] || preempted; then requeue "it failed when Slurm was about to end it"; fi ;;
    esac
    return "$outcome" # what still runs is ended by Slurm with the script
}

case ${CONTAINER:-} in
    "") CONTAINER_COMMAND=() CONTAINER_OPTIONS=() ;;
    *.sif)
        CONTAINER_COMMAND=(apptainer exec --nv --bind "$PWD${MOUNTS:+,$MOUNTS}" --pwd "$PWD" "$CONTAINER")
        CONTAINER_OPTIONS=()
        ;;
    *)
        CONTAINER_COMMAND=()
        CONTAINER_OPTIONS=(--container-image="$CONTAINER" --container-mounts="$PWD:$PWD${MOUNTS:+,$MOUNTS}" --container-workdir="$PWD")
        ;;
esac
