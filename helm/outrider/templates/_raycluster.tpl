{{/*
One replica: a RayCluster whose head pod holds the controller.

The controller is a container of its own beside KubeRay's: KubeRay writes the command of the first
one (`ray start --block`) and its probes, and Kubernetes restarts, probes and drains each by itself.
A driver attaches to the raylet through sockets in /tmp/ray and is known to it by its process id, so
both containers share /tmp, /dev/shm and the process namespace.
*/}}

{{/* Seconds that a replica serves after its end is announced. With the gate its successor serves already. */}}
{{- define "outrider.handoverSeconds" -}}
{{- ternary 0 (int .Values.upgrade.handoverSeconds) .Values.upgrade.gate -}}
{{- end }}

{{/* Seconds from a replica's announced end to its exit: handover, drain, exit. */}}
{{- define "outrider.engineStopSeconds" -}}
{{- add (include "outrider.handoverSeconds" .) .Values.engine.drainSeconds (include "outrider.endSeconds" .) -}}
{{- end }}

{{- define "outrider.engineGraceSeconds" -}}
{{- add (include "outrider.handoverSeconds" .) .Values.engine.drainSeconds (include "outrider.bufferSeconds" .) -}}
{{- end }}

{{/*
Nothing but calls goes through Ray, so its store has the least it takes. GPUs are counted here, as
KubeRay counts only resources whose names end in "gpu", which a MIG slice's does not.
*/}}
{{- define "outrider.rayParams" -}}
num-cpus: {{ .cpus | toString | quote }}
num-gpus: {{ .gpus | toString | quote }}
object-store-memory: "104857600"
{{- end }}

{{/*
A worker that is to end notifies the controller, which moves or drains its replica; it ends as soon as
that is done. Ray's head stays for as long as the controller may drain.
*/}}
{{- define "outrider.leaveSeconds" -}}
{{- add .Values.engine.moveSeconds .Values.engine.drainSeconds (include "outrider.endSeconds" .) -}}
{{- end }}

{{- define "outrider.workerGraceSeconds" -}}
{{- add (include "outrider.handoverSeconds" .) .Values.engine.moveSeconds .Values.engine.drainSeconds (include "outrider.bufferSeconds" .) -}}
{{- end }}

{{- define "outrider.leave" -}}
lifecycle:
  preStop:
    exec:
      command:
        - outrider
        - leave
        - --limit={{ include "outrider.leaveSeconds" . }}
        - --unreached={{ add .Values.engine.drainSeconds (include "outrider.endSeconds" .) }}
        {{- with include "outrider.handoverSeconds" . | int }}
        - --after={{ . }}
        {{- end }}
{{- end }}

{{- define "outrider.upgradeHook" -}}
helm.sh/hook: pre-upgrade,pre-rollback
helm.sh/hook-weight: {{ . | quote }}
helm.sh/hook-delete-policy: before-hook-creation
{{- end }}

{{- define "outrider.podMeta" -}}
labels:
  {{- include "outrider.selector" . | nindent 2 }}
  {{- with .root.Values.engine.podLabels }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- with .root.Values.engine.podAnnotations }}
annotations: {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{/* Ray outlives the controller: ranks must be there while it drains. */}}
{{- define "outrider.rayContainer" -}}
name: {{ .name }}
image: {{ include "outrider.image" (dict "root" .root "kind" "engine") }}
imagePullPolicy: {{ .root.Values.image.pullPolicy }}
securityContext: {{- toYaml .root.Values.securityContext | nindent 2 }}
env: {{- include "outrider.env.engine" .root | nindent 2 }}
{{ if eq .name "ray-head" }}{{ include "outrider.preStop" (include "outrider.engineStopSeconds" .root) }}{{ else }}{{ include "outrider.leave" .root }}{{ end }}
resources: {{- toYaml .resources | nindent 2 }}
volumeMounts: {{- include "outrider.mounts.engine" .root | nindent 2 }}
{{- end }}

{{- define "outrider.controllerContainer" -}}
name: controller
image: {{ include "outrider.image" (dict "root" .root "kind" "engine") }}
imagePullPolicy: {{ .root.Values.image.pullPolicy }}
args: [outrider, controller, --config, /etc/outrider/config.yaml]
securityContext: {{- toYaml .root.Values.securityContext | nindent 2 }}
env: {{- include "outrider.env.engine" .root | nindent 2 }}
ports:
  - {name: controller, containerPort: 50060}
  - {name: admin, containerPort: 8081}
{{ include "outrider.probes" .root }}
{{- with include "outrider.preStop" (include "outrider.handoverSeconds" .root) }}
{{ . }}
{{- end }}
resources: {{- toYaml .root.Values.head.controllerResources | nindent 2 }}
volumeMounts:
  - {name: config, mountPath: /etc/outrider, readOnly: true}
  {{- include "outrider.mounts.engine" .root | nindent 2 }}
{{- end }}

{{/* The draft prefers the node of its own replica's target; it may be elsewhere. */}}
{{- define "outrider.nearTarget" -}}
podAffinity:
  preferredDuringSchedulingIgnoredDuringExecution:
    - weight: 100
      podAffinityTerm:
        topologyKey: kubernetes.io/hostname
        labelSelector:
          matchLabels: {{- include "outrider.selector" (dict "root" . "component" "target") | nindent 12 }}
        matchLabelKeys: [ray.io/cluster]
{{- end }}

{{/*
The pods of a role. Ray gets one CPU for each rank and two to spare, whatever the pod has: these are
slots, and a rank on a GPU needs little CPU.
*/}}
{{- define "outrider.workerGroup" -}}
{{- $values := index .root.Values .role -}}
{{- $ranks := div (int $values.tensorParallel) (int $values.nodes) -}}
{{- $device := default .root.Values.target.device $values.device -}}
{{- $resources := deepCopy $values.resources -}}
{{- $gpus := 0 -}}
{{- if eq $device "cuda" -}}
{{- $gpus = $ranks -}}
{{- $resource := include "outrider.gpuResource" . -}}
{{- $_ := set $resources "limits" (merge (dict $resource (toString $gpus)) (default dict $resources.limits)) -}}
{{- end -}}
{{- $scheduling := pick $values "nodeSelector" "tolerations" "affinity" "topologySpreadConstraints" "priorityClassName" "runtimeClassName" -}}
{{- if and (eq .role "draft") $values.nearTarget (not $values.affinity) -}}
{{- $scheduling = set $scheduling "affinity" (include "outrider.nearTarget" .root | fromYaml) -}}
{{- end -}}
groupName: {{ .role }}
replicas: {{ $values.nodes }}
minReplicas: {{ $values.nodes }}
maxReplicas: {{ $values.nodes }}
labels: {outrider-role: {{ .role }}}
rayStartParams: {{- merge (include "outrider.rayParams" (dict "cpus" (add $ranks 2) "gpus" $gpus) | fromYaml) (deepCopy .root.Values.ray.workerStartParams) | toYaml | nindent 2 }}
template:
  metadata: {{- include "outrider.podMeta" (dict "root" .root "component" .role) | nindent 4 }}
  spec:
    {{- include "outrider.podBasics" .root | nindent 4 }}
    {{- with include "outrider.scheduling" $scheduling | trim }}
    {{- . | nindent 4 }}
    {{- end }}
    terminationGracePeriodSeconds: {{ include "outrider.workerGraceSeconds" .root }}
    containers:
      - {{ include "outrider.rayContainer" (dict "root" .root "name" .role "resources" $resources) | nindent 8 | trim }}
    volumes: {{- include "outrider.volumes.engine" .root | nindent 6 }}
{{- end }}

{{- define "outrider.rayClusterSpec" -}}
{{- $root := .root -}}
rayVersion: {{ $root.Values.ray.version | quote }}
authOptions: {mode: token, secretName: {{ include "outrider.raySecret" $root }}}
headGroupSpec:
  rayStartParams: {{- merge (include "outrider.rayParams" (dict "cpus" 0 "gpus" 0) | fromYaml) (deepCopy $root.Values.ray.headStartParams) | toYaml | nindent 4 }}
  template:
    metadata: {{- include "outrider.podMeta" (dict "root" $root "component" "controller") | nindent 6 }}
    spec:
      {{- include "outrider.podBasics" $root | nindent 6 }}
      {{- with include "outrider.scheduling" $root.Values.head | trim }}
      {{- . | nindent 6 }}
      {{- end }}
      shareProcessNamespace: true
      terminationGracePeriodSeconds: {{ include "outrider.engineGraceSeconds" $root }}
      containers:
        - {{ include "outrider.rayContainer" (dict "root" $root "name" "ray-head" "resources" $root.Values.head.resources) | nindent 10 | trim }}
        - {{ include "outrider.controllerContainer" . | nindent 10 | trim }}
      volumes:
        - name: config
          configMap: {name: {{ .configMap }}}
        {{- include "outrider.volumes.engine" $root | nindent 8 }}
workerGroupSpecs:
  - {{ include "outrider.workerGroup" (dict "root" $root "role" "target") | nindent 4 | trim }}
  {{- if include "outrider.hasDraftPods" $root }}
  - {{ include "outrider.workerGroup" (dict "root" $root "role" "draft") | nindent 4 | trim }}
  {{- end }}
{{- end }}
