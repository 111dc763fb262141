{{/* What pods have in common. */}}

{{/* Seconds beyond preStop and drain: processes have 20 to end (END_S), kubelet the rest. */}}
{{- define "outrider.endSeconds" -}}20{{- end }}
{{- define "outrider.bufferSeconds" -}}30{{- end }}

{{/* The longest that a start may take before a container counts as dead. */}}
{{- define "outrider.startupSeconds" -}}
{{- add .Values.engine.startTimeoutSeconds .Values.engine.placementTimeoutSeconds -}}
{{- end }}

{{/*
Probes ask the admin port. Liveness never depends on an engine: it is the gateway that holds the
streams while engines restart.
*/}}
{{- define "outrider.probes" -}}
{{- $probes := .Values.probes -}}
startupProbe:
  httpGet: {path: /livez, port: admin}
  periodSeconds: {{ $probes.periodSeconds }}
  timeoutSeconds: {{ $probes.timeoutSeconds }}
  failureThreshold: {{ divf (include "outrider.startupSeconds" .) $probes.periodSeconds | ceil | int }}
livenessProbe:
  httpGet: {path: /livez, port: admin}
  periodSeconds: {{ $probes.periodSeconds }}
  timeoutSeconds: {{ $probes.timeoutSeconds }}
  failureThreshold: {{ $probes.livenessFailures }}
  # A dead process has nothing to hand over or to drain.
  terminationGracePeriodSeconds: {{ include "outrider.bufferSeconds" . }}
readinessProbe:
  httpGet: {path: /readyz, port: admin}
  periodSeconds: {{ $probes.periodSeconds }}
  timeoutSeconds: {{ $probes.timeoutSeconds }}
  failureThreshold: {{ $probes.readinessFailures }}
{{- end }}

{{/* The resource that a GPU of a role is. */}}
{{- define "outrider.gpuResource" -}}
{{- default .root.Values.engine.gpuResource (index .root.Values .role).gpuResource -}}
{{- end }}

{{- define "outrider.preStop" -}}
{{- if gt (int .) 0 -}}
lifecycle:
  preStop:
    sleep: {seconds: {{ int . }}}
{{- end -}}
{{- end }}

{{/* `enableServiceLinks` is off since a Service named outrider would set OUTRIDER_PORT=tcp://... */}}
{{- define "outrider.podBasics" -}}
enableServiceLinks: false
automountServiceAccountToken: false
serviceAccountName: {{ include "outrider.serviceAccount" . }}
{{- with .Values.image.pullSecrets }}
imagePullSecrets:
{{- range . }}
  - name: {{ . }}
{{- end }}
{{- end }}
securityContext: {{- toYaml .Values.podSecurityContext | nindent 2 }}
{{- end }}

{{- define "outrider.scheduling" -}}
{{- range $key := list "nodeSelector" "tolerations" "affinity" "topologySpreadConstraints" }}
{{- with index $ $key }}
{{ $key }}: {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}
{{- range $key := list "priorityClassName" "runtimeClassName" }}
{{- with index $ $key }}
{{ $key }}: {{ . }}
{{- end }}
{{- end }}
{{- end }}

{{- define "outrider.fromSecret" -}}
- name: {{ .name }}
  valueFrom: {secretKeyRef: {name: {{ .secret }}, key: {{ .key }}}}
{{- end }}

{{/* Where files may be written, as the root is read-only, and how the hub is reached. */}}
{{- define "outrider.env.common" -}}
{{- include "outrider.fromSecret" (dict "name" "OUTRIDER_SECRET" "secret" (include "outrider.linkSecret" .) "key" "secret") }}
- {name: HOME, value: /tmp}
- {name: HF_HOME, value: {{ .Values.modelCache.mountPath }}/hub}
- {name: OUTRIDER_CACHE, value: {{ .Values.modelCache.mountPath }}/outrider}
{{- with include "outrider.hubSecret" . }}
{{ include "outrider.fromSecret" (dict "name" "HF_TOKEN" "secret" . "key" "token") }}
{{- end }}
{{- with .Values.hub.endpoint }}
- {name: HF_ENDPOINT, value: {{ . | quote }}}
{{- end }}
{{- if .Values.hub.offline }}
- {name: HF_HUB_OFFLINE, value: "1"}
{{- end }}
{{- end }}

{{- define "outrider.env.engine" -}}
{{ include "outrider.env.common" . }}
- {name: TRITON_CACHE_DIR, value: /tmp/triton}
{{- if eq .Values.mode "kuberay" }}
- {name: RAY_AUTH_MODE, value: token}
{{ include "outrider.fromSecret" (dict "name" "RAY_AUTH_TOKEN" "secret" (include "outrider.raySecret" .) "key" "auth_token") }}
- {name: RAY_USAGE_STATS_ENABLED, value: "0"}
{{- end }}
{{- with .Values.engine.extraEnv }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{- define "outrider.env.front" -}}
{{- with include "outrider.apiKeySecret" . }}
{{- include "outrider.fromSecret" (dict "name" "OUTRIDER_API_KEY" "secret" . "key" "api-key") }}
{{- end }}
{{- end }}

{{- define "outrider.volume.models" -}}
- name: models
{{- $cache := .Values.modelCache }}
{{- if eq $cache.type "pvc" }}
  persistentVolumeClaim: {claimName: {{ include "outrider.claim" . }}}
{{- else if eq $cache.type "hostPath" }}
  hostPath: {path: {{ required "modelCache.hostPath is not set, but modelCache.type is hostPath; name a folder of the nodes." $cache.hostPath }}, type: DirectoryOrCreate}
{{- else }}
  emptyDir: {}
{{- end }}
{{- end }}

{{/* Volumes of pods with engines in them. */}}
{{- define "outrider.volumes.engine" -}}
{{ include "outrider.volume.models" . }}
- name: tmp
  emptyDir: {}
- name: shared-mem
  emptyDir: {medium: Memory, sizeLimit: {{ .Values.engine.sharedMemory }}}
{{- with .Values.engine.extraVolumes }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{- define "outrider.mounts.engine" -}}
- {name: models, mountPath: {{ .Values.modelCache.mountPath }}}
- {name: tmp, mountPath: /tmp}
- {name: shared-mem, mountPath: /dev/shm}
{{- with .Values.engine.extraVolumeMounts }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{/* Files of a process with listeners for clients: keys and certificates. */}}
{{- define "outrider.volumes.front" -}}
{{- with .Values.auth.keysSecret }}
- name: keys
  secret: {secretName: {{ . }}}
{{- end }}
{{- with include "outrider.tlsSecret" . }}
- name: tls
  secret: {secretName: {{ . }}}
{{- end }}
{{- if and .Values.tls.enabled .Values.tls.clientCASecret }}
- name: client-ca
  secret: {secretName: {{ .Values.tls.clientCASecret }}}
{{- end }}
{{- end }}

{{- define "outrider.mounts.front" -}}
{{- if .Values.auth.keysSecret }}
- {name: keys, mountPath: /etc/outrider-keys, readOnly: true}
{{- end }}
{{- if .Values.tls.enabled }}
- {name: tls, mountPath: /etc/outrider-tls, readOnly: true}
{{- if .Values.tls.clientCASecret }}
- {name: client-ca, mountPath: /etc/outrider-client-ca, readOnly: true}
{{- end }}
{{- end }}
{{- end }}
